"""Small tokenizers with the normaliser, pre-tokenizer, post-processor and decoder of the real families.

Each is trained on a few lines and written to a directory as `transformers` would read it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

TEMPLATES = Path(__file__).parent / "templates"

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it's 12345 times 67 that we've said so.",
    "You are a helpful assistant. What is the capital of France? Paris is the capital of France.\n\n",
    "def main():\n    return [x for x in range(10) if x > 2]\n\tprint('done')  # a comment\n",
    '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}',
    "Voilà, où est l'été? Größe, naïve, señor. Ünïcödé.",
    "你好，世界。今天天气很好。日本語のテキストです。",
    "नमस्ते दुनिया। यह हिन्दी है। مرحبا بالعالم، كيف حالك؟",
    "👩‍👩‍👧‍👦 family 😀 flags 🇫🇷",
] * 4
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Family:
    """How to build one family's tokenizer, and the settings saved beside it."""

    name: str
    build: Callable[[], Backend]
    config: dict[str, Any] = field(default_factory=dict)

    def write(self, directory: Path, template: str | None = None, **config: Any) -> Path:
        """Write tokenizer.json, tokenizer_config.json and, given its name, a chat template."""
        directory.mkdir(parents=True, exist_ok=True)
        self.build().save(str(directory / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self.config, **config}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        if template is not None:
            (directory / "chat_template.jinja").write_text(source(template))
        return directory


def source(template: str) -> str:
    """Return the source of a template fixture."""
    return (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")


@cache
def _byte_pairs(digits: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = split(WORDS + digits + REST)
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    return trained(backend, trainer)


@cache
def _pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A SentencePiece-like vocabulary: unknown, BOS, EOS, 256 byte tokens, then pieces of a limited alphabet."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    vocab, merges = trained(backend, trainers.BpeTrainer(vocab_size=420, show_progress=False, limit_alphabet=80))
    pieces = [*(f"<0x{b:02X}>" for b in range(256)), *sorted(vocab, key=vocab.__getitem__)]
    return {piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>", *pieces])}, merges


def trained(backend: Backend, trainer: trainers.Trainer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    backend.train_from_iterator(CORPUS, trainer)
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def special(*texts: str) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False) for text in texts]


def bos_first(backend: Backend, bos: str) -> processors.PostProcessor:
    return processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, backend.token_to_id(bos))])


def _byte_level(digits: str = r"\p{N}", **options: Any) -> Backend:
    vocab, merges = _byte_pairs(digits)
    backend = Backend(models.BPE(vocab, merges, **options))
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


def gpt2() -> Backend:
    backend = _byte_level()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    return backend


def smollm() -> Backend:
    backend = _byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.add_special_tokens(special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    return backend


def llama3() -> Backend:
    backend = _byte_level(r"\p{N}{1,3}", ignore_merges=True)
    backend.pre_tokenizer = split(WORDS + r"\p{N}{1,3}" + REST)
    headers = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
    backend.add_special_tokens(special("<|begin_of_text|>", "<|end_of_text|>", *headers))
    backend.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), bos_first(backend, "<|begin_of_text|>")]
    )
    return backend


def qwen() -> Backend:
    backend = _byte_level()
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = split(WORDS + r"\p{N}" + REST)
    backend.add_special_tokens(special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    plain = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
    backend.add_tokens([AddedToken(text, normalized=False) for text in plain])
    return backend


def qwen_special_think() -> Backend:
    """Like Qwen's, but with thinking tags that are special tokens."""
    backend = qwen()
    backend.add_special_tokens(special("<think>", "</think>"))
    return backend


def _sentencepiece() -> Backend:
    vocab, merges = _pieces()
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(special("<unk>", "<s>", "</s>"))
    return backend


def llama2() -> Backend:
    backend = _sentencepiece()
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.post_processor = bos_first(backend, "<s>")
    return backend


def mistral() -> Backend:
    backend = _sentencepiece()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tools = ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
    backend.add_special_tokens(special("[INST]", "[/INST]", *tools))
    backend.post_processor = bos_first(backend, "<s>")
    return backend


def yi() -> Backend:
    """A SentencePiece vocabulary with a Metaspace decoder and no BOS."""
    backend = _sentencepiece()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    backend.add_special_tokens(special("<|im_start|>", "<|im_end|>"))
    return backend


_CHATML = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
_SP = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
FAMILIES = {
    family.name: family
    for family in (
        Family("gpt2", gpt2, {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}),
        Family("smollm", smollm, _CHATML),
        Family("llama3", llama3, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
        Family("qwen", qwen, {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
        Family("qwen_special_think", qwen_special_think, {"eos_token": "<|im_end|>"}),
        Family("llama2", llama2, _SP),
        Family("mistral", mistral, _SP),
        Family("yi", yi, {**_SP, "eos_token": "<|im_end|>"}),
    )
}

PAIRS = [
    ("llama2", "llama2"),
    ("llama3", "llama3"),
    ("qwen", "qwen_tools"),
    ("qwen", "qwen_thinking"),
    ("qwen_special_think", "qwen_thinking"),
    ("mistral", "mistral"),
    ("gpt2", "chatml"),
    ("yi", "chatml"),
    ("qwen", "hermes"),
    ("llama3", "bitnet"),
    ("smollm", "smollm2"),
]
"""Families with the template that belongs to them."""

TEXTS = [
    "",
    "Hello, world!",
    "  leading, trailing and   inner spaces  ",
    "It's 1234567 o'clock; we've 3.14 and １２.\n\n\tdef f(x):\r\n        return x\n",
    "👩‍👩‍👧‍👦 😀🏽 🇫🇷 ☕️",
    "你好，世界。日本語 한국어",
    "नमस्ते क्षत्रिय مَرْحَبًا שָׁלוֹם",
    "e\u0301 \u00e9 \u2581 \ufffd \u200b\u00a0",
    "<0x41> <think>maybe</think> <tool_call>",
    "a\x00b\x7f",
]
