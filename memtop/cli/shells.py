"""How each shell asks for completions, and what it is answered.

click's own scripts are not enough: bash splits a word at `=` and `:`, and the script for fish loses
what follows a comma. After `KEY=` a path can begin, and no shell may add a blank.
"""

from __future__ import annotations

import os
import re
from typing import Any, ClassVar

from click.shell_completion import BashComplete, CompletionItem, FishComplete, ShellComplete, ZshComplete, split_arg_string

_BASH = """\
%(complete_func)s() {
    local IFS=$'\\n'
    local response type value

    response=$(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD %(complete_var)s=bash_complete $1)

    for completion in $response; do
        IFS=',' read -r type value <<< "$completion"

        if [[ $type == 'dir' ]]; then
            COMPREPLY=()
            compopt -o dirnames
        elif [[ $type == 'file' ]]; then
            COMPREPLY=()
            compopt -o default
        elif [[ $type == 'plain' ]]; then
            COMPREPLY+=("$value")
            [[ $value == *[=.:/] ]] && compopt -o nospace
        fi
    done

    return 0
}

%(complete_func)s_setup() {
    complete -o nosort -F %(complete_func)s %(prog_name)s
}

%(complete_func)s_setup;
"""
_ZSH = """\
#compdef %(prog_name)s

%(complete_func)s() {
    local -a completions completions_with_descriptions open open_with_descriptions response
    local type key descr
    (( ! $+commands[%(prog_name)s] )) && return 1

    response=("${(@f)$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) %(complete_var)s=zsh_complete %(prog_name)s)}")

    for type key descr in ${response}; do
        if [[ "$type" == "plain" ]]; then
            if [[ "$descr" == "_" && "$key" == *[=.:/] ]]; then
                open+=("$key")
            elif [[ "$descr" == "_" ]]; then
                completions+=("$key")
            elif [[ "$key" == *[=.:/] ]]; then
                open_with_descriptions+=("$key":"$descr")
            else
                completions_with_descriptions+=("$key":"$descr")
            fi
        else
            [[ "$key" != "_" ]] && compset -P "${(b)key}"
            if [[ "$type" == "dir" ]]; then
                _path_files -/
            else
                _path_files -f
            fi
        fi
    done

    if [ -n "$completions_with_descriptions" ]; then
        _describe -V unsorted completions_with_descriptions -U
    fi
    if [ -n "$open_with_descriptions" ]; then
        _describe -V unsorted open_with_descriptions -U -S ''
    fi
    if [ -n "$completions" ]; then
        compadd -U -V unsorted -a completions
    fi
    if [ -n "$open" ]; then
        compadd -U -V unsorted -S '' -a open
    fi
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    # autoload from fpath, call function directly
    %(complete_func)s "$@"
else
    # eval/source/. command, register function for later
    compdef %(complete_func)s %(prog_name)s
fi
"""
_FISH = """\
function %(complete_func)s;
    set -l response (env %(complete_var)s=fish_complete COMP_WORDS=(commandline -cp) COMP_CWORD=(commandline -t) %(prog_name)s);

    while test (count $response) -ge 2;
        set -l type $response[1];
        set -l key $response[2];
        set -l rest $response[3];
        set -e response[1..3];

        if test $type = "plain";
            printf '%%s\\t%%s\\n' $key "$rest";
        else;
            set -l paths (__fish_complete_path "$rest");
            test $type = "dir"; and set paths (__fish_complete_directories "$rest");
            for path in $paths;
                printf '%%s%%s\\n' (string replace -r '^_$' '' -- $key) $path;
            end;
        end;
    end;
end;

complete --no-files --command %(prog_name)s --arguments "(%(complete_func)s)";
"""


def rejoined(words: list[str]) -> tuple[list[str], str, str]:
    """bash splits words at `=` and `:`. The words before the cursor, the word under it, and the
    beginning of that word that bash keeps whatever completes it."""
    whole: list[str] = []
    is_open = False
    for number, word in enumerate(words):
        is_break = re.fullmatch("[=:]+", word) is not None
        if whole and word and (is_break or is_open):
            whole[-1] += word
        else:
            whole.append(word)
        is_open = is_break
        last = word if not is_break or number == 0 else ""
    *before, incomplete = whole
    return before, incomplete, incomplete.removesuffix(last)


class _Bash(BashComplete):
    source_template: ClassVar[str] = _BASH
    _kept = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        number = int(os.environ["COMP_CWORD"])
        words = split_arg_string(os.environ["COMP_WORDS"])[1 : number + 1]
        before, incomplete, self._kept = rejoined(words + [""] * (number - len(words)))
        return before, incomplete

    def format_completion(self, item: CompletionItem[Any]) -> str:
        return f"{item.type},{item.value.removeprefix(self._kept) if item.type == 'plain' else item.value}"


class _Zsh(ZshComplete):
    source_template: ClassVar[str] = _ZSH

    def format_completion(self, item: CompletionItem[str]) -> str:
        return super().format_completion(item) if item.type == "plain" else f"{item.type}\n{item.head or '_'}\n_"


class _Fish(FishComplete):
    source_template: ClassVar[str] = _FISH

    def format_completion(self, item: CompletionItem[str]) -> str:
        if item.type == "plain":
            return f"plain\n{item.value}\n{item.help or ''}"
        return f"{item.type}\n{item.head or '_'}\n{item.value.removeprefix(item.head)}"


SHELLS: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}
