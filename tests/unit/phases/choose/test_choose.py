"""`choose` as a whole: what it refuses, what it may depend on, and what it reports."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onekernel.config import Sampling
from onekernel.errors import ConfigError, NumericError
from onekernel.phases.choose import Choice, TokenCounts, choose, draw
from onekernel.phases.choose.elementary import gumbel, uniform
from onekernel.phases.choose.filters import Kept

VOCAB = 500
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2)) * 3.0
WARM = Sampling(temperature=1.0, seed=11)
GREEDY = Sampling()
EVERYTHING = Sampling(
    temperature=0.9,
    top_k=100,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias={7: 2.0, 9: -100.0},
    seed=4,
    logprobs=3,
)


def tokens(sampling: Sampling, count: int = 64) -> list[int]:
    return [choose(LOGITS, sampling, position, vocab_limit=VOCAB).token_id for position in range(count)]


def test_greedy_takes_the_highest_logit_and_of_equal_ones_the_lowest_id() -> None:
    assert choose(LOGITS, GREEDY, 5, vocab_limit=VOCAB) == Choice(int(LOGITS.argmax()))
    assert choose(torch.tensor([1.0, 4.0, 2.0, 4.0, 4.0]), GREEDY, 5, vocab_limit=5).token_id == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", [GREEDY, WARM, EVERYTHING], ids=["greedy", "warm", "everything"])
@pytest.mark.complaint("E3", file="phases/choose/reference.py", old="if count:", new="if count == len(raw):")
def test_logits_that_are_not_finite_are_an_error_not_a_token(bad: float, sampling: Sampling) -> None:
    counts = TokenCounts.start([1], 1, VOCAB)
    for where in ([0], [VOCAB - 1], [3, 4, 250]):
        logits = LOGITS.clone()
        logits[where] = bad
        with pytest.raises(NumericError, match=rf"^{len(where)} of 500 logits at position 41 are NaN or infinite"):
            choose(logits, sampling, 41, counts, vocab_limit=VOCAB)


def test_finite_logits_whose_sum_overflows_are_fine() -> None:
    assert choose(torch.tensor([3e38, 3.1e38, 3e38]), GREEDY, 0, vocab_limit=3).token_id == 1


@pytest.mark.complaint(
    "E4", file="phases/choose/reference.py", old="logits[:vocab_limit].float()", new="logits[:].float()"
)
@pytest.mark.parametrize("sampling", [GREEDY, WARM, EVERYTHING], ids=["greedy", "warm", "everything"])
@pytest.mark.parametrize("padding", [1000.0, math.nan, -math.inf])
def test_padded_ids_do_not_exist_whatever_their_logits(sampling: Sampling, padding: float) -> None:
    padded = torch.cat((LOGITS, torch.full((12,), padding)))
    mask = torch.ones(VOCAB + 12, dtype=torch.bool)
    counts = TokenCounts.start([1, 2, 2], 1, VOCAB + 12)
    for position in range(20):
        expected = choose(LOGITS, sampling, position, TokenCounts.start([1, 2, 2], 1, VOCAB), vocab_limit=VOCAB)
        assert choose(padded, sampling, position, counts, vocab_limit=VOCAB, mask=mask) == expected


@pytest.mark.complaint(
    "J2", file="phases/choose/philox.py", old="key = seed & _MASK, seed >> 32", new="key = 0, seed >> 32"
)
def test_equal_seeds_give_equal_tokens_and_other_seeds_others() -> None:
    seeds = [0, 1, 2**32, 2**32 + 1, 2**64 - 1]
    answers = [tokens(Sampling(temperature=1.0, seed=seed)) for seed in seeds]
    assert answers == [tokens(Sampling(temperature=1.0, seed=seed)) for seed in seeds]
    assert len({tuple(answer) for answer in answers}) == len(seeds)
    assert all(len(set(answer)) > 5 for answer in answers)  # a seed does not make it greedy


@pytest.mark.complaint(
    "J4",
    file="phases/choose/draw.py",
    old="words(seed, position, kept.token_ids)",
    new="torch.randint(2**32, kept.token_ids.shape)",
)
def test_other_requests_change_nothing() -> None:
    torch.manual_seed(1)
    alone = tokens(WARM)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    interleaved = []
    for position in range(64):
        choose(-LOGITS, Sampling(temperature=2.0, seed=99), position, vocab_limit=VOCAB)
        interleaved.append(choose(LOGITS, WARM, position, vocab_limit=VOCAB).token_id)
    assert interleaved == alone
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.complaint(
    "J3", file="phases/choose/filters.py", old="max(sampling.temperature, COLDEST)", new="sampling.temperature"
)
@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-40, 1e-30, 1e-6])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.3}])
def test_hardly_any_temperature_is_greedy(temperature: float, filters: dict[str, float]) -> None:
    counts = TokenCounts.start([int(LOGITS.argmax())], 1, VOCAB)
    greedy = choose(LOGITS, Sampling(**filters), 0, counts, vocab_limit=VOCAB)  # type: ignore[arg-type]
    for position in range(10):
        cold = Sampling(temperature=temperature, seed=3, **filters)  # type: ignore[arg-type]
        assert choose(LOGITS, cold, position, counts, vocab_limit=VOCAB) == greedy


def test_a_tie_is_broken_by_the_draw_even_at_the_lowest_temperature() -> None:
    tied = torch.tensor([0.0, 30.0, 30.0, 0.0])
    drawn = {choose(tied, Sampling(temperature=1e-6), position, vocab_limit=4).token_id for position in range(40)}
    assert drawn == {1, 2}


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_a_mask_limits_the_choice_and_must_leave_something(sampling: Sampling) -> None:
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    with pytest.raises(ConfigError, match=r"no token is left at position 8: the mask and logit_bias .* all 500"):
        choose(LOGITS, sampling, 8, vocab_limit=VOCAB, mask=mask)
    mask[[31, 400]] = True
    chosen = {choose(LOGITS, sampling, position, vocab_limit=VOCAB, mask=mask).token_id for position in range(50)}
    assert chosen == ({31, 400} if sampling is WARM else {max(31, 400, key=lambda i: float(LOGITS[i]))})


def test_bias_lifts_bans_and_must_name_real_tokens() -> None:
    assert choose(LOGITS, Sampling(logit_bias={3: 90.0}), 0, vocab_limit=VOCAB).token_id == 3
    high = torch.tensor([500.0, 0.0])
    assert choose(high, Sampling(logit_bias={0: -99.0}), 0, vocab_limit=2).token_id == 0
    assert choose(high, Sampling(logit_bias={0: -100.0}), 0, vocab_limit=2).token_id == 1
    with pytest.raises(ConfigError, match="token 500; the vocabulary ends at 499"):
        choose(LOGITS, Sampling(logit_bias={500: 1.0}), 0, vocab_limit=VOCAB)


def test_penalties_need_counts_and_may_not_overflow() -> None:
    with pytest.raises(ConfigError, match="TokenCounts"):
        choose(LOGITS, Sampling(presence_penalty=1.0), 0, vocab_limit=VOCAB)
    counts = TokenCounts.start([0], 1, 2)
    with pytest.raises(ConfigError, match="a score of inf at position 6"):
        choose(torch.tensor([1e30, 1.0]), Sampling(repetition_penalty=1e-30), 6, counts, vocab_limit=2)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    counts = TokenCounts.start([1, 2, 3, 3], 2, VOCAB)
    true = torch.log_softmax(LOGITS.double(), 0)
    best = true.argsort(descending=True).tolist()
    for position in range(10):
        choice = choose(LOGITS, EVERYTHING, position, counts, vocab_limit=VOCAB)
        assert choice.logprob == pytest.approx(float(true[choice.token_id]), abs=1e-5)
        assert [token for token, _ in choice.top] == best[:3]
        assert [p for _, p in choice.top] == pytest.approx(true[best[:3]].tolist(), abs=1e-5)


def test_logprobs_are_exact_at_a_large_vocabulary() -> None:
    """A float32 sum of its exponentials would be 1e-5 off."""
    logits = torch.randn(128256, generator=torch.Generator().manual_seed(0)) * 4.2
    choice = choose(logits, Sampling(logprobs=0), 0, vocab_limit=128256)
    true = torch.log_softmax(logits.double(), 0)[choice.token_id]
    assert choice.logprob == pytest.approx(float(true), abs=2e-7)


def test_how_many_logprobs() -> None:
    flat = torch.zeros(40)
    uniform_logprob = pytest.approx(-math.log(40), rel=1e-6)
    assert choose(flat, Sampling(), 0, vocab_limit=40) == Choice(0, None, ())
    assert choose(flat, Sampling(logprobs=0), 0, vocab_limit=40) == Choice(0, uniform_logprob, ())
    top = choose(flat, Sampling(logprobs=20), 0, vocab_limit=40).top
    assert [token for token, _ in top] == list(range(20))  # of equal ones the lowest ids, in order
    assert len(choose(flat[:3], Sampling(logprobs=20), 0, vocab_limit=3).top) == 3


@pytest.fixture
def float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_neither_the_dtype_of_the_logits_nor_the_default_dtype_matters(float64_by_default: None) -> None:
    coarse = LOGITS.bfloat16()
    counts = TokenCounts.start([1, 2, 3, 3], 2, VOCAB)
    warm = [choose(coarse, EVERYTHING, position, counts, vocab_limit=VOCAB) for position in range(30)]
    torch.set_default_dtype(torch.float32)
    before = coarse.clone()
    assert warm == [choose(coarse.float(), EVERYTHING, position, counts, vocab_limit=VOCAB) for position in range(30)]
    assert torch.equal(coarse, before)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=VOCAB, max_size=VOCAB), st.integers(0, 2**64 - 1), st.integers(0, 2**20))
def test_any_partition_of_the_vocabulary_gives_the_same_token(parts: list[int], seed: int, position: int) -> None:
    whole = Kept(torch.arange(VOCAB), LOGITS)
    owner = torch.tensor(parts)
    winners = sorted(draw.draw(whole.take(owner == part), seed, position) for part in set(parts))
    assert draw.draw(whole.take(torch.tensor(winners)), seed, position) == draw.draw(whole, seed, position)


EDGES = st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**32 - 2, 2**32 - 200]) | st.integers(0, 2**32 - 1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(EDGES, st.sampled_from([0.0, 1e-7, 0.5, 5.0, 3e7])), min_size=1, max_size=12))
@example([(2**32 - 1, 3e7), (5, 0.0)])  # unclamped, v would be 1 and the winner's noise -inf
@example([(4279122657, 0.0), (4294549103, 0.5)])  # the library may see them in the other order
@example([(252262996, 0.0), (4294428516, 5.0)])
def test_rough_logarithms_never_lose_the_winner(drawn: list[tuple[int, float]]) -> None:
    noise, scores = torch.tensor([word for word, _ in drawn]), torch.tensor([score for _, score in drawn])
    exact = scores + gumbel(uniform(noise))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw, "words", lambda seed, position, token_ids: noise)
        assert draw.draw(Kept(torch.arange(len(drawn)), scores), 0, 0) == int(exact.argmax())


def test_counts_follow_the_output_and_can_be_rolled_back() -> None:
    counts = TokenCounts.start([4, 4, 1, 2, 2], 3, 6)
    assert counts.prompt.tolist() == [False, True, False, False, True, False]
    assert counts.output.tolist() == [0, 0, 2, 0, 0, 0]
    counts.add(5)
    counts.add(2)
    assert counts.output.tolist() == [0, 0, 3, 0, 0, 1]
    counts.remove(2)
    counts.remove(5)
    assert counts.output.tolist() == [0, 0, 2, 0, 0, 0]
    with pytest.raises(ConfigError, match="token 5 is not in the output"):
        counts.remove(5)
    assert TokenCounts.start([], 0, 3).prompt.tolist() == [False] * 3
