"""Talk with a model.

Ctrl-C stops an answer and keeps what there is of it; at the prompt Ctrl-C or Ctrl-D leaves. A paste of many lines is
one message, and Alt-Enter starts a new line (both need `pip install prompt-toolkit`). /help lists the commands.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from onekernel.cli.console import Console
from onekernel.cli.flags import add_context, add_model, add_sampling, add_template, sampling_params
from onekernel.errors import TemplateError

if TYPE_CHECKING:
    from onekernel.cli.dialogue import Dialogue

HELP = "talk with a model"
USAGE = "MODEL [options]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_context(parser)
    add_model(parser)
    add_sampling(parser)
    add_template(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command; return the exit code."""
    params = sampling_params(args)

    from onekernel.cli.conversation import Conversation
    from onekernel.cli.dialogue import Dialogue
    from onekernel.cli.line_editor import open_line_editor
    from onekernel.cli.session import open_llm

    with open_llm(args, console) as llm:
        if llm.tokenizer.chat_template is None:
            raise TemplateError("this model has no chat template, so it cannot chat; use `onekernel generate`")
        dialogue = Dialogue(llm, Conversation(args.system), params, args.chat_template_kwargs, console)
        read_line = open_line_editor(console)
        console.note("/help lists commands; Ctrl-C stops an answer; Ctrl-D leaves")
        try:
            while _step(dialogue, read_line()):
                pass
        except EOFError:  # Ctrl-D
            return 0
    return 0


def _step(dialogue: Dialogue, line: str) -> bool:
    """Handle one entry of the user; return whether the chat goes on."""
    if line.startswith("/"):
        return dialogue.command(line)
    if line.strip():
        dialogue.say(line)
    return True
