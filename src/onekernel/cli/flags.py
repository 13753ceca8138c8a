"""Flags that several commands share, under llama.cpp's and vLLM's short words, and what they mean to the engine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from onekernel.errors import ConfigError

if TYPE_CHECKING:
    from onekernel.config import EngineConfig, SamplingParams

_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "f32": "float32", "float": "float32"}

_FLAG_OF = {
    "max_tokens": "--max-tokens",
    "max_context": "--ctx-size",
    "temperature": "--temp",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "min_p": "--min-p",
    "repetition_penalty": "--repeat-penalty",
    "presence_penalty": "--presence-penalty",
    "frequency_penalty": "--frequency-penalty",
    "logit_bias": "--logit-bias",
    "seed": "--seed",
    "logprobs": "--logprobs",
    "threads": "--threads",
    "dtype": "--dtype",
    "backend": "--backend",
    "slice_tokens": "--slice-tokens",
    "max_waiting": "--max-waiting",
    "prefix_cache": "--no-prefix-cache",
    "kv_tokens": "--kv-tokens",
    "sparse": "--sparse",
}
"""Config field -> the flag that sets it, for messages."""

_NOT_FOR_TEMPLATES = frozenset(
    ("self", "prompt", "params", "progress", "constraint", "messages", "parse_special_in_content", "check_length")
)
"""Names that our own functions give a meaning to on the way to the template."""


def add_model(parser: argparse.ArgumentParser, *, running: bool = True) -> None:
    """Add the model, where it comes from and where it goes; with `running` also how it runs."""
    group = parser.add_argument_group("model")
    group.add_argument("model", metavar="MODEL", nargs="?", help="Hugging Face directory, GGUF file or hub id")
    group.add_argument("-m", "--model", dest="model_flag", metavar="MODEL", help="the same as a flag")
    group.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub id")
    group.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: random weights for a config.json or the name of a shipped configuration",
    )
    group.add_argument("--device", metavar="NAME", default="auto", help="auto (default), cpu, cuda or cuda:N")
    group.add_argument("--dtype", metavar="TYPE", default="auto", help="auto (default), bfloat16 or float32")
    if running:
        group.add_argument("--backend", metavar="NAME", default="auto", help="auto (default), reference or megakernel")
        group.add_argument(
            "--sparse", metavar="NAME", default="auto", help="read only neurons that fire: auto (default), on or off"
        )
        group.add_argument("-t", "--threads", metavar="N", type=int, help="CPU threads (default: all it may use)")


def add_context(
    parser: argparse.ArgumentParser,
    meaning: str = "tokens of prompt and answer together (default: the model's maximum, at most 8192; 0: its maximum)",
) -> None:
    """Add the context's size."""
    names = ("-c", "--ctx-size", "--max-model-len", "--max-context")
    parser.add_argument(*names, dest="max_context", metavar="N", type=int, help=meaning)


def add_sharing(parser: argparse.ArgumentParser) -> None:
    """Add how requests share the engine, for commands that take several at once."""
    group = parser.add_argument_group("sharing")

    def number(name: str, help: str) -> None:
        group.add_argument(name, metavar="N", type=int, help=help)

    number("--slice-tokens", help="tokens a request makes in a row while others wait (default 64)")
    number("--max-waiting", help="requests that may wait; one more is refused (default 256)")
    number("--kv-tokens", help="tokens of the KV cache over all requests (default: four contexts, or what fits)")
    group.add_argument(
        "--no-prefix-cache", dest="prefix_cache", action="store_false", help="prefill every prompt from its beginning"
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add everything about the choice of tokens and the end of the answer."""
    group = parser.add_argument_group("sampling", "defaults come from the model's generation_config.json, else greedy")

    def number(*names: str, kind: type, help: str, dest: str | None = None) -> None:
        options: dict[str, Any] = {"dest": dest} if dest else {}
        group.add_argument(*names, metavar="N", type=kind, help=help, **options)

    number(
        *("-n", "--max-tokens", "--predict", "--n-predict"),
        kind=int,
        help="answer tokens at most (default, or -1: the rest of the context)",
    )
    number("--temp", "--temperature", kind=float, dest="temperature", help="0: greedy, up to 100")
    number("--top-k", kind=int, help="keep the N likeliest tokens; 0: all")
    number("--top-p", kind=float, help="keep the likeliest tokens that reach this probability together")
    number("--min-p", kind=float, help="drop tokens less likely than N times the likeliest")
    number(
        *("--repeat-penalty", "--repetition-penalty"),
        kind=float,
        dest="repetition_penalty",
        help="over 1: tokens of prompt and answer get less likely",
    )
    number("--presence-penalty", kind=float, help="subtracted from tokens already in the answer, -2 to 2")
    number("--frequency-penalty", kind=float, help="the same for every occurrence, -2 to 2")
    group.add_argument(
        "--logit-bias",
        metavar="ID=VALUE",
        type=_token_bias,
        action="append",
        default=[],
        help="added to a token's logit, -100 (never) to 100; may be repeated",
    )
    number("--seed", kind=int, help="same seed, same answer (default, or -1: a new one, printed)")
    group.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="end before this text; may be repeated"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")


def add_template(parser: argparse.ArgumentParser) -> None:
    """Add what goes to the chat template."""
    group = parser.add_argument_group("chat template")
    group.add_argument("--system", metavar="TEXT", help="system message (default: the template's own, if it has one)")
    group.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        type=_template_options,
        default={},
        help="passed to the template, such as '{\"enable_thinking\": false}'",
    )


def model_name(args: argparse.Namespace) -> str:
    """Return the model, given as MODEL or with -m; raises ConfigError if it is given twice or not at all."""
    if (args.model is None) == (args.model_flag is None):
        found = "none was given" if args.model is None else f"both {args.model!r} and {args.model_flag!r} were given"
        raise ConfigError(f"one model is needed, as MODEL or with -m, and {found}")
    name: str = args.model or args.model_flag
    if not name:
        raise ConfigError("the model's name is empty; give a directory, a GGUF file or a hub id")
    return name


def engine_config(args: argparse.Namespace, **fixed: Any) -> EngineConfig:
    """Return the engine's settings; `fixed` fields win over flags. Raises ConfigError naming the flag."""
    from onekernel.config import EngineConfig

    fields = {name: getattr(args, name, None) for name in EngineConfig.__dataclass_fields__}
    fields["dtype"] = _DTYPES.get(args.dtype, args.dtype)
    given = {name: value for name, value in fields.items() if value is not None}
    return _named(EngineConfig, given | fixed)  # type: ignore[no-any-return]


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Return what `add_sampling`'s flags ask for; raises ConfigError naming the flag, the value and its range."""
    from onekernel.config import SamplingParams

    names = [name for name in _FLAG_OF if name in SamplingParams.__dataclass_fields__ and name != "logit_bias"]
    given = {name: getattr(args, name, None) for name in names}
    for name in ("max_tokens", "seed"):  # llama.cpp writes 'no limit' and 'any seed' as -1
        given[name] = None if given[name] == -1 else given[name]
    fields = {name: value for name, value in given.items() if value is not None}
    return _named(  # type: ignore[no-any-return]
        SamplingParams,
        fields | {"logit_bias": dict(args.logit_bias) or None, "stop": tuple(args.stop), "ignore_eos": args.ignore_eos},
    )


def _named(make: Any, fields: dict[str, Any]) -> Any:
    """Make a config object; an error that begins with a field's name begins with its flag instead."""
    try:
        return make(**fields)
    except ConfigError as error:
        field, _, rest = str(error).partition(" ")
        raise ConfigError(f"{_FLAG_OF.get(field, field)} {rest}") from None


def _token_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=VALUE, such as 42=-100") from None


def _template_options(text: str) -> dict[str, Any]:
    import json

    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object such as {{}}")
    own = sorted(_NOT_FOR_TEMPLATES.intersection(value))
    if own:
        raise argparse.ArgumentTypeError(f"{own[0]} is no template's option; leave it out")
    return value
