"""Answer one prompt and stream the text to stdout.

The prompt becomes a user message in the model's chat template, if it has one and --raw does not forbid it. Notes, bars
and the timings go to stderr; so does a thinking model's thinking if stdout is not a terminal.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from onekernel.cli.console import Console
from onekernel.cli.flags import add_context, add_model, add_sampling, add_template, sampling_params
from onekernel.errors import ConfigError

if TYPE_CHECKING:
    from onekernel.engine.prompt import Prompt

HELP = "answer one prompt"
USAGE = "MODEL [-p TEXT | -f FILE] [options]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt (default, or -: standard input)")
    source.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file (-: standard input)")
    parser.add_argument("--raw", action="store_true", help="take the prompt as it is, without the chat template")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the text")
    parser.add_argument(
        "--logprobs", metavar="N", type=int, help="with --json: log probabilities of each token and the N likeliest"
    )
    add_context(parser)
    add_model(parser)
    add_sampling(parser)
    add_template(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command; return the exit code."""
    from dataclasses import replace

    params = sampling_params(args)
    if args.logprobs is not None:
        if not args.json:
            raise ConfigError("--logprobs is shown only with --json; add it")
        params = replace(params, logprobs=args.logprobs)
    if args.raw and (args.system is not None or args.chat_template_kwargs):
        raise ConfigError("--system and --chat-template-kwargs go to the chat template, and --raw leaves it out")
    text = read_prompt(args)

    import json

    from onekernel.cli.answer import AnswerPrinter
    from onekernel.cli.report import completion_json, timings_line
    from onekernel.cli.session import answer, open_llm

    with open_llm(args, console) as llm:
        prompt = as_prompt(text, args, llm.tokenizer.chat_template is not None, console)
        template = {} if isinstance(prompt, str) else args.chat_template_kwargs
        completion = answer(llm, prompt, params, template, console, None if args.json else AnswerPrinter())
        if args.json:
            console.data(json.dumps(completion_json(completion, llm), ensure_ascii=False))
        console.note(timings_line(completion, llm.loaded.load_s))
    return 130 if completion.finish_reason == "cancelled" else 0


def read_prompt(args: argparse.Namespace) -> str:
    """Return the prompt from -p, -f or standard input; one line break at the end of a file does not count."""
    from onekernel.cli.text_input import read_text

    if args.prompt is not None and args.prompt != "-":
        text: str = args.prompt
    elif args.file is not None:
        text = read_text(args.file)
    elif args.prompt is None and sys.stdin.isatty():
        raise ConfigError("there is no prompt; give it with -p TEXT, -f FILE or through standard input")
    else:
        text = read_text("-")
    if not text:
        raise ConfigError("the prompt is empty; give some text with -p TEXT, -f FILE or through standard input")
    return text


def as_prompt(text: str, args: argparse.Namespace, has_template: bool, console: Console) -> Prompt:
    """Return messages for the chat template, or the text itself with --raw or for a model without a template."""
    if args.raw:
        return text
    if not has_template:
        if args.system is not None or args.chat_template_kwargs:
            raise ConfigError("--system and --chat-template-kwargs need a chat template, and this model has none")
        console.note("the model has no chat template: the prompt is taken as it is")
        return text
    return messages(text, args.system)


def messages(text: str, system: str | None) -> list[dict[str, Any]]:
    """Return one user message, after the system message if there is one."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]
