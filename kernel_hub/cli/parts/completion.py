"""Completion of the command line by bash, zsh and fish, written from the parser: a script each.

What a script offers is fixed when it is written: commands, options, and the names they take.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

SHELLS = ("bash", "zsh", "fish")


class Completed(NamedTuple):
    """A command's words: option -> what may follow it, the words of its own, whether files too."""

    help: str
    options: dict[str, list[str] | None]  # None: nothing follows
    words: Sequence[str]


def completed(
    parsers: Mapping[str, argparse.ArgumentParser],
    helps: Mapping[str, str],
    words: Mapping[str, Iterable[str]],
    values: Mapping[str, Iterable[str]],
) -> dict[str, Completed]:
    """What there is to complete of each command: `words` by command, `values` by option."""
    found = {}
    for command, parser in parsers.items():
        options: dict[str, list[str] | None] = {}
        for action in parser._actions:
            choices = list(action.choices or values.get(action.dest, ()))
            takes = None if action.nargs == 0 else [str(choice) for choice in choices]
            options.update(dict.fromkeys(action.option_strings, takes))
        found[command] = Completed(helps.get(command, ""), options, sorted(words.get(command, ())))
    return found


def script(shell: str, commands: Mapping[str, Completed]) -> str:
    """The text that `shell` reads."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands)


def _bash(commands: Mapping[str, Completed]) -> str:
    cases = []
    for name, command in commands.items():
        after = [
            f"            {option}) words='{' '.join(takes)}' ;;"
            for option, takes in command.options.items()
            if takes is not None
        ]
        words = " ".join(command.words)
        cases.append(
            "\n".join(
                [
                    f"    {name})",
                    f"        options='{' '.join(command.options)}'",
                    '        case "$before" in',
                    *after,
                    f"            *) words='{words}' ;;",
                    "        esac ;;",
                ]
            )
        )
    return f"""\
# eval "$(kernel-hub --completion bash)" in ~/.bashrc
_kernel_hub() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" options words=
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W '{" ".join(commands)} --help --version --completion' -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
    --completion) options= words='{" ".join(SHELLS)}' ;;
{chr(10).join(cases)}
    *) return ;;
    esac
    if [[ "$word" == -* ]]; then
        words="$options"
    fi
    # Files are offered where no word is (complete -o default).
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _kernel_hub kernel-hub
"""


def _zsh(commands: Mapping[str, Completed]) -> str:
    # zsh runs bash's function by itself.
    return (
        '# eval "$(kernel-hub --completion zsh)" in ~/.zshrc\n'
        "autoload -U +X compinit && compinit\n"
        "autoload -U +X bashcompinit && bashcompinit\n" + _bash(commands).partition("\n")[2]
    )


def _fish(commands: Mapping[str, Completed]) -> str:
    lines = ["# kernel-hub --completion fish | source, in ~/.config/fish/config.fish"]
    none = "complete -c kernel-hub -n __fish_use_subcommand"
    for name, command in commands.items():
        lines.append(f"{none} -f -a {name} -d {_quoted(command.help)}")
    lines.append(f"{none} -f -l version -l help")
    lines.append(f"{none} -f -l completion -x -a '{' '.join(SHELLS)}'")
    for name, command in commands.items():
        on = f"complete -c kernel-hub -n '__fish_seen_subcommand_from {name}'"
        if command.words:
            lines.append(f"{on} -a '{' '.join(command.words)}'")
        for option, takes in command.options.items():
            spelled = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            follows = "" if takes is None else f" -x -a '{' '.join(takes)}'" if takes else " -r"
            lines.append(f"{on} {spelled}{follows}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
