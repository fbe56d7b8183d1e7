"""Command groups: help in panels with whole descriptions, a default command, former spellings, suggestions."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup
from typer.main import get_group


class CommandGroup(TyperGroup):
    """Lists its commands by `rich_help_panel`; a description is wrapped where it is too long, never cut."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Flags that are not given are False: Typer imports Pydantic, which takes 0.1 s, to convert a None."""
        params = super().get_params(ctx)
        for param in params:
            if getattr(param, "is_flag", False) and param.default is None:
                param.default = False
        return params

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        visible = [(name, self.commands[name]) for name in self.list_commands(ctx) if not self.commands[name].hidden]
        width = max((len(name) for name, _ in visible), default=0)  # one column for all panels
        for name, command in visible:
            panel = getattr(command, "rich_help_panel", None)
            row = (name.ljust(width), command.get_short_help_str(1000))
            panels.setdefault(panel if isinstance(panel, str) else "Commands", []).append(row)
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


class DefaultCommandGroup(CommandGroup):
    """A group whose `default_command` takes the arguments that do not begin with another command's name."""

    default_command: ClassVar[str]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        bare_help = not args and self.no_args_is_help
        if not bare_help and (not args or args[0] not in (*self.commands, *ctx.help_option_names)):
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)


class LazyCommands(Mapping[str, Any]):
    """The commands of `panels`, in order: panel of the help → word → a module of this folder and what it calls it."""

    def __init__(self, panels: Mapping[str, Mapping[str, str]]) -> None:
        self.places = {word: (place, panel) for panel, words in panels.items() for word, place in words.items()}
        self.loaded: dict[str, Any] = {}

    def __getitem__(self, word: str) -> Any:
        if word not in self.loaded:
            place, panel = self.places[word]
            module, _, name = place.partition(".")
            command = getattr(importlib.import_module(f".{module}", __package__), name)
            parent = typer.Typer(rich_markup_mode=None)
            if isinstance(command, typer.Typer):
                parent.add_typer(command, name=word, rich_help_panel=panel)
            else:
                parent.command(word, rich_help_panel=panel)(command)
            self.loaded[word] = get_group(parent).commands[word]
        return self.loaded[word]

    def __contains__(self, word: object) -> bool:
        return word in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


class RootGroup(CommandGroup):
    """The top level: commands are imported when they are used; former spellings are rewritten to those of today."""

    panels: ClassVar[Mapping[str, Mapping[str, str]]] = {}  # see LazyCommands
    former: ClassVar[Mapping[str, str]] = {}  # a command or a group's command of earlier → how it is spelt now

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = LazyCommands(self.panels)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        for count in (2, 1):
            if len(args) >= count and (now := self.former.get(" ".join(args[:count]))):
                args = [*now.split(), *args[count:]]
                break
        self.suggest_commands = False  # ours know commands of groups too
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            spelling = {**dict(self.subcommands()), **self.former, **{name: name for name in self.commands}}
            near = dict.fromkeys(spelling[word] for word in get_close_matches(args[0], spelling))
            if near and hasattr(error, "message"):
                error.message = f"{error.message.rstrip('.')}. Did you mean {', '.join(map(repr, near))}?"
            raise

    def subcommands(self) -> Iterator[tuple[str, str]]:
        for group, command in self.commands.items():
            for name in getattr(command, "commands", ()):
                yield name, f"{group} {name}"
