"""Environments by name, `prefix:name`, where the prefix selects the package of the environment."""

from __future__ import annotations

import ast
import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import jax

from .._base.checked import checked
from .._base.extras import require_package
from ..errors import UserValueError
from ..functional._errors import did_you_mean
from ._env import Env, check_env


class UnknownPrefixError(UserValueError):
    """The name of an environment has a prefix that is not registered."""


class Source(NamedTuple):
    """The module of this package with `make_<prefix>`, the module to be installed, and the extra that installs it."""

    adapter: str
    package: str
    extra: str


SOURCES = {
    "gymnax": Source("_packages", "gymnax", "envs"),
    "jaxmarl": Source("_jaxmarl", "jaxmarl", "marl"),
    "brax": Source("_packages", "brax.envs", "brax"),
    "playground": Source("_packages", "mujoco_playground", "playground"),
    "craftax": Source("_packages", "craftax.craftax_env", "craftax"),
    "jumanji": Source("_packages", "jumanji", "jumanji"),
    "pgx": Source("_packages", "pgx", "pgx"),
    "xminigrid": Source("_packages", "xminigrid", "xminigrid"),
    "gym": Source("_gymnasium", "gymnasium", "gymnasium"),
    "envpool": Source("_gymnasium", "envpool", "envpool"),
    "ale": Source("_atari", "ale_py.vector_env", "atari"),
    "tasks": Source("_tasks", "jax", "envs"),  # this and the next belong to this package
    "popgym": Source("_tasks", "jax", "envs"),
}
"""The built-in prefixes."""

_registered: dict[str, Callable[..., Env]] = {}


@checked
def make(env_id: str, **settings: Any) -> Env:
    """Make an environment from its name, with automatic resets and with truncation separate from termination.

    Args:
        env_id: "prefix:name", such as "brax:ant" or "pgx:connect_four"; the prefix is one of `list_prefixes()`. A name
            without a prefix means gymnax. Settings may follow, as on a command line: "brax:ant,backend=spring".
        **settings: settings of the environment, which `docs/environments.md` lists for each prefix.

    Raises:
        ValueError: if a prefix, name or setting is unknown; the error lists similar names. MissingPackage: if the
            package is not installed; the error names the extra that installs it.

    Example:
        >>> from ppo_parts import envs
        >>> envs.make("CartPole-v1,max_steps_in_episode=200").action_space.n
        2
    """
    env_id, settings = split_settings(env_id, settings)
    prefix, name = env_id.split(":", 1) if ":" in env_id else ("gymnax", env_id)
    make_env = _registered.get(prefix) or _load_adapter(env_id, prefix)
    try:
        env = make_env(name, **settings)
    except TypeError as error:
        named = re.search(r"(?:unexpected keyword argument|multiple values for argument) '(\w+)'", str(error))
        if not named or named[1] not in settings:
            raise
        raise UserValueError(f"{env_id} does not have all of the settings {settings}: {error}") from error
    check_env(env_id, env)
    return env


def _load_adapter(env_id: str, prefix: str) -> Callable[..., Env]:
    if prefix not in SOURCES:
        of_package = next((name for name, x in SOURCES.items() if prefix in (x.extra, x.package)), prefix)
        there = did_you_mean(of_package, list_prefixes()) or f"; the prefixes are {', '.join(list_prefixes())}"
        says = f"{env_id!r}: {prefix!r} is not a prefix of environments{there}"
        raise UnknownPrefixError(f"{says} (envs.register adds one)")
    source = SOURCES[prefix]
    with deferred("seaborn", "matplotlib.pyplot"), jax.ensure_compile_time_eval():  # some call JAX on import
        require_package(source.package, source.extra)
    return getattr(importlib.import_module(f".{source.adapter}", __package__), f"make_{prefix}")


@contextlib.contextmanager
def deferred(*names: str) -> Iterator[None]:
    """In this context, defer imports of these modules until they are used.

    Environment packages import plotting libraries, which takes longer than all the rest, but training never plots.
    """
    stand_ins = {name: _Deferred(name) for name in names if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            if isinstance(sys.modules.get(name), _Deferred):
                del sys.modules[name]


class _Deferred(ModuleType):
    """A module that is imported when one of its attributes is first used."""

    def __getattr__(self, attribute: str) -> Any:
        if isinstance(sys.modules.get(self.__name__), _Deferred):
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), attribute)


@checked
def register(prefix: str, make: Callable[..., Env]) -> None:
    """Make `envs.make("prefix:name", **settings)` call `make(name, **settings)`.

    Args:
        prefix: letters, digits, "_" and "-", but not a built-in prefix. It replaces an earlier registration.
        make: function that returns an `Env`.

    Example:
        >>> from ppo_parts import envs
        >>> envs.register("short", lambda name: envs.make(name, max_steps_in_episode=10))
        >>> env = envs.make("short:CartPole-v1")
    """
    if not re.fullmatch(r"[\w-]+", prefix):
        raise UserValueError(f"register: a prefix consists of letters, digits, _ and -, got {prefix!r}")
    if prefix in SOURCES:
        raise UserValueError(f"register: the prefix {prefix!r} comes with ppo_parts: choose another one")
    _registered[prefix] = make


def list_prefixes() -> tuple[str, ...]:
    """Return the prefixes that `make` knows."""
    return (*SOURCES, *_registered)


WORD = re.compile(r"""'[^']*'|"[^"]*"|(?<!\w)(?P<bare>[^\W\d]\w*)\b(?!\s*=)""")
"""A quoted string, or a bare word that is not the name of a setting."""


def split_settings(env_id: str, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Split "name,a=1,b=word" into the name and its settings, which are added to `settings`."""
    name, comma, text = env_id.partition(",")
    if not comma:
        return env_id, settings
    quoted, named, valid = WORD.sub(_quote, text), {}, False
    with contextlib.suppress(SyntaxError, ValueError, AttributeError):  # AttributeError: it is not a call
        call: Any = ast.parse(f"_({quoted})", mode="eval").body
        named = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        valid = len(named) == len(call.keywords) > 0 and not call.args and None not in named
    if not valid:
        looks = """look like 'a=1,b=True,c=word,d="some words"', with quotes around other values"""
        raise UserValueError(f"{env_id!r}: settings after the name must be given once each and {looks}; got {text!r}")
    if twice := sorted(named.keys() & settings.keys()):
        raise UserValueError(f"{env_id!r}: {', '.join(twice)} is also given as an argument: give it once")
    return name, settings | named


def _quote(match: re.Match[str]) -> str:
    """Quote a bare word, so that no quotes are needed in a shell; "inf" is a number."""
    word = match["bare"]
    if word in ("true", "false", "none", "null"):
        raise UserValueError(f"{word} after the name of an environment: write True, False or None, or quote the word")
    if word is None or word in ("True", "False", "None"):
        return match[0]
    return "1e999" if word == "inf" else repr(word)
