"""Plain data that everything else takes: the model's dimensions, the engine's limits, the sampling parameters.

No file, tensor or device access. `ModelConfig` uses the names of Hugging Face's config.json.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from onekernel.errors import ConfigError

PAGE_TOKENS = 64
"""Tokens in one page of the KV cache."""

PREFILL_CHUNK_TOKENS = 512
"""Prompt tokens computed at once: fixed, so that the same prefix always gives the same bits."""

DEFAULT_CONTEXT_TOKENS = 8192
"""Context when none is asked for (or the model's maximum, if that is smaller)."""

MAX_TOP_LOGPROBS = 20

MAX_THREADS = 1024
"""CPU threads that may be asked for; far more of them crash PyTorch instead of failing."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched; formulas as in transformers' `modeling_rope_utils`.

    `default` needs nothing else, `linear` and `dynamic` need `factor`, `llama3` needs all. `dynamic` is fixed per
    request at the longest it may become.
    """

    kind: Literal["default", "linear", "dynamic", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class Ternary:
    """How a model's projections are ternary: codes -1, 0 and 1 times a scale, multiplied with int8 activations."""

    group: int | None = None
    """Columns that share a scale, 64 or 128; None: one scale for each projection."""
    head: Literal["dense", "ternary", "int8"] = "dense"
    """How embedding and head are stored: both in the model's dtype, both ternary, or the head as int8 rows beside an
    embedding in the model's dtype."""

    def __post_init__(self) -> None:
        if self.group not in (None, 64, 128):
            raise ConfigError(f"the group of ternary scales is {self.group!r}; it must be 64 or 128 columns, or null")
        if self.head not in ("dense", "ternary", "int8"):
            raise ConfigError(f"the head of a ternary model is {self.head!r}; it must be dense, ternary or int8")


_MOST_OF_A_MODEL = {
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
    "vocab_size": 1 << 20,
    "max_position_embeddings": 1 << 30,
}
"""Far beyond any model; what is larger is damaged, and tables of names or tokens for it would take for ever."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions and options of a Llama-class decoder (names of Hugging Face's config.json)."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    hidden_act: Literal["silu", "relu", "relu2"] = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    sub_norms: bool = False
    """True: RMS norms over the whole width before the output and the down projection (BitNet)."""
    ternary: Ternary | None = None

    def __post_init__(self) -> None:
        for name, most in _MOST_OF_A_MODEL.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")
            if value > most:
                raise ConfigError(f"{name} is {value}; at most {most} can be taken")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads is {self.num_attention_heads}, not a multiple of "
                f"num_key_value_heads, {self.num_key_value_heads}"
            )
        if self.head_dim % 2 or self.head_dim > 256:
            raise ConfigError(f"head_dim is {self.head_dim}; it must be even (RoPE turns pairs) and at most 256")
        if not (self.rms_norm_eps > 0 and math.isfinite(self.rms_norm_eps)):
            raise ConfigError(f"rms_norm_eps is {self.rms_norm_eps}; it must be a positive number")
        if self.ternary is not None and self.ternary.group is not None:
            widths = {
                "hidden_size": self.hidden_size,
                "q_size": self.q_size,
                "intermediate_size": self.intermediate_size,
            }
            for name, width in widths.items():
                if width % self.ternary.group:
                    raise ConfigError(f"{name} is {width}, not a multiple of the ternary group of {self.ternary.group}")

    @property
    def q_size(self) -> int:
        """Rows of the query projection: num_attention_heads * head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key (or value) projection: num_key_value_heads * head_dim."""
        return self.num_key_value_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer, norms and biases included."""
        matrices = self.hidden_size * (2 * self.q_size + 2 * self.kv_size + 3 * self.intermediate_size)
        biases = (
            self.qkv_bias * (self.q_size + 2 * self.kv_size)
            + self.o_bias * self.hidden_size
            + self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        )
        norms = 2 * self.hidden_size + self.qk_norm * 2 * self.head_dim
        return matrices + biases + norms + self.sub_norms * (self.q_size + self.intermediate_size)

    @property
    def parameters(self) -> int:
        """All parameters; a tied embedding counts once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * self.layer_parameters + embeddings + self.hidden_size

    @property
    def parameters_read_per_token(self) -> int:
        """Parameters one decode step reads: every layer, the final norm and the head, one embedding row."""
        head = self.vocab_size * self.hidden_size
        return self.num_hidden_layers * self.layer_parameters + head + 2 * self.hidden_size

    @property
    def context_limit(self) -> int:
        """The model's longest context: linear and dynamic scaling stretch the trained one by their factor."""
        stretch = self.rope_scaling.factor if self.rope_scaling.kind in ("linear", "dynamic") else 1.0
        return int(self.max_position_embeddings * stretch)

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Bytes of keys and values of one position over all layers."""
        return 2 * self.num_hidden_layers * self.kv_size * element_bytes


SparseChoice = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits and choices of one engine. `max_context` 0 means the model's maximum, None the default of 8,192."""

    device: str = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    max_context: int | None = None
    backend: Literal["auto", "reference", "megakernel"] = "auto"
    threads: int | None = None
    slice_tokens: int = 64
    """Tokens that a request may make in a row while others wait."""
    max_waiting: int = 256
    """Requests that may wait for their first turn; one more is refused with QueueFullError. 0: none may wait."""
    prefix_cache: bool = True
    """Keep the pages of ended requests, so that a prompt that begins like one of them is prefilled from there on."""
    kv_tokens: int | None = None
    """Positions of the KV cache over all sequences, at least one context; 0: one context; None: four contexts, or what
    half of the memory allows that is free beyond the first."""
    sparse: SparseChoice = "auto"
    """Whether the megakernel reads only the neurons that fire; auto: of models with a ReLU gate."""

    def __post_init__(self) -> None:
        if isinstance(self.max_context, int) and self.max_context < 0:
            raise ConfigError(f"max_context is {self.max_context}; give 0 for the model's maximum or at least 2 tokens")
        _whole("max_context", self.max_context, 0, None)
        if self.max_context == 1:
            raise ConfigError("max_context is 1; a prompt token and an answer token need at least 2")
        _whole("threads", self.threads, 1, MAX_THREADS)
        _number("slice_tokens", self.slice_tokens, 1)
        _number("max_waiting", self.max_waiting, 0)
        _whole("kv_tokens", self.kv_tokens, 0, None)
        if not isinstance(self.prefix_cache, bool):
            raise ConfigError(f"prefix_cache is {self.prefix_cache!r}; it must be true or false")
        if not isinstance(self.device, str):
            raise ConfigError(f'device is {self.device!r}; it must be "auto", "cpu", "cuda" or "cuda:N"')
        if self.dtype not in ("auto", "bfloat16", "float32"):
            raise ConfigError(f"dtype is {self.dtype!r}; it must be auto, bfloat16 or float32")
        if self.backend not in ("auto", "reference", "megakernel"):
            raise ConfigError(f"backend is {self.backend!r}; it must be auto, reference or megakernel")
        if self.sparse not in ("auto", "on", "off"):
            raise ConfigError(f"sparse is {self.sparse!r}; it must be auto, on or off")


def context_tokens(asked: int | None, model: ModelConfig) -> int:
    """Return the context an engine allocates for `asked` (None: default, 0: the model's maximum).

    Raises ConfigError above the model's maximum, and where a sliding window is shorter than the context, because full
    attention would then give other text than the model was trained for.
    """
    limit = model.context_limit
    if asked is not None and asked > limit:
        raise ConfigError(
            f"a context of {asked} tokens was asked for; the model allows {limit} (--ctx-size 0 takes them all)"
        )
    tokens = min(limit, DEFAULT_CONTEXT_TOKENS) if asked is None else (asked or limit)
    if model.sliding_window is not None and model.sliding_window < tokens:
        raise ConfigError(
            f"the model attends to a sliding window of {model.sliding_window} tokens, shorter than the context of "
            f"{tokens}; only full attention is built in: use --ctx-size {model.sliding_window} or less"
        )
    return tokens


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a caller may ask of one answer. None means: the model's generation_config.json, else the stated default.

    Filters apply in this order: mask, logit_bias, repetition, presence and frequency penalty, temperature, top_k,
    top_p, min_p (transformers' order). `repetition_penalty` counts prompt and output, as in transformers;
    `presence_penalty` and `frequency_penalty` count the output only, as in OpenAI's API.
    """

    max_tokens: int | None = None
    """Answer tokens at most (1 or more); None: the rest of the context."""
    temperature: float | None = None
    """0: greedy. Otherwise logits are divided by it; 0 to 100."""
    top_k: int | None = None
    """Keep the k likeliest tokens; 0: all. Where neither caller nor model says: 50, as in transformers."""
    top_p: float | None = None
    """Keep the smallest set of likeliest tokens whose probability reaches top_p; above 0, up to 1."""
    min_p: float | None = None
    """Drop tokens less likely than min_p times the likeliest; 0 to 1."""
    repetition_penalty: float | None = None
    """Divide positive (multiply negative) logits of tokens seen in prompt or output; above 0, up to 10."""
    presence_penalty: float | None = None
    """Subtracted once from the logit of every token already in the output; -2 to 2."""
    frequency_penalty: float | None = None
    """Subtracted for each occurrence in the output; -2 to 2."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of the given token ids; -100 to 100, -100 or less bans, as in OpenAI's API."""
    seed: int | None = None
    """0 to 2**64 - 1; None: drawn anew and returned with the answer."""
    logprobs: int | None = None
    """None: none; n: the chosen token's log probability and those of the n likeliest, 0 to 20."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these strings."""
    stop_token_ids: tuple[int, ...] = ()
    """The answer also ends at these ids; they are not part of the text."""
    ignore_eos: bool = False
    """True: go on after an end-of-sequence token."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _tuple("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ConfigError(f"logit_bias is {self.logit_bias!r}; it must map token ids to numbers")
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos is {self.ignore_eos!r}; it must be true or false")
        _whole("max_tokens", self.max_tokens, 1, None)
        _real("temperature", self.temperature, 0.0, 100.0)
        _whole("top_k", self.top_k, 0, None)
        _real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _whole("seed", self.seed, 0, 2**64 - 1)
        _whole("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        for token, bias in (self.logit_bias or {}).items():
            _whole("a token id in logit_bias", token, 0, None)
            _real(f"logit_bias of token {token}", bias, -100.0, 100.0)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ConfigError(f"a stop string is {text!r}; give strings of at least one character")
        for token in self.stop_token_ids:
            _whole("a stop token id", token, 0, None)

    def resolve(self, generation_config: Mapping[str, Any]) -> Sampling:
        """Fill what is None from the model's generation_config.json, else with the neutral value; draw a seed if none.

        The result is that of transformers' `generate`, `do_sample` being `temperature > 0` if a temperature is given
        (see `defaults_from`). Raises ConfigError if the model's own value is out of range.
        """
        sample = None if self.temperature is None else self.temperature > 0
        defaults = defaults_from(generation_config, sample)
        taken = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        try:
            full = replace(self, **taken)
        except ConfigError as error:
            raise ConfigError(f"in the model's generation_config.json: {error}") from error
        return Sampling(
            temperature=_or(full.temperature, 0.0),
            top_k=_or(full.top_k, 0),
            top_p=_or(full.top_p, 1.0),
            min_p=_or(full.min_p, 0.0),
            repetition_penalty=_or(full.repetition_penalty, 1.0),
            presence_penalty=_or(full.presence_penalty, 0.0),
            frequency_penalty=_or(full.frequency_penalty, 0.0),
            logit_bias=dict(full.logit_bias or {}),
            seed=_or(full.seed, secrets.randbits(63)),
            logprobs=full.logprobs,
        )


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters with every default filled in: what a backend computes with. See `SamplingParams`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the logits, so that they must be counted."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


_FROM_GENERATION_CONFIG = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def defaults_from(generation_config: Mapping[str, Any], sample: bool | None = None) -> dict[str, Any]:
    """Return a model's sampling defaults, by the names of `SamplingParams`, as transformers' `generate` finds them.

    `sample` is whether the caller asked to sample; None: what `do_sample` in the generation_config says, else greedy.
    When sampling, what the file does not state is temperature 1 and top_k 50; when greedy, the file's temperature,
    top_k, top_p and min_p are ignored.
    """
    if sample is None:
        sample = generation_config.get("do_sample") is True
    found: dict[str, Any] = {}
    for name in _FROM_GENERATION_CONFIG:
        value = generation_config.get(name)
        if value is not None and (sample or name == "repetition_penalty"):
            found[name] = value
    if sample:
        found.setdefault("temperature", 1.0)
        found.setdefault("top_k", 50)
    return found


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _tuple(name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise ConfigError(f"{name} is {value!r}; it must be a list")
    return tuple(value)


def _whole(name: str, value: object, low: int, high: int | None) -> None:
    if value is None:
        return
    limit = f"from {low} to {high}" if high is not None else f"of at least {low}"
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise ConfigError(f"{name} is {value!r}; it must be a whole number {limit}")


def _number(name: str, value: object, low: int) -> None:
    """Refuse what `_whole` refuses, and None."""
    if value is None:
        raise ConfigError(f"{name} is None; it must be a whole number of at least {low}")
    _whole(name, value, low, None)


def _real(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value > high or value < low or (open_low and value == low):  # type: ignore[operator]
        raise ConfigError(f"{name} is {value!r}; it must be {'above' if open_low else 'from'} {low:g} up to {high:g}")
