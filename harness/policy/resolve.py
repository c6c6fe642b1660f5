"""From a LiteLLM-style ``model_path`` to a URL, a model name and a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pydantic import SecretStr
from yarl import URL

from harness.errors import ConfigError, SecretsError
from harness.models import Record


class Policy(Record):
    """A model behind an OpenAI-compatible server."""

    name: str
    """What people call it: the ``model_path`` it was resolved from."""
    base_url: str
    """Absolute, without a trailing slash and without ``/chat/completions``. Empty: nobody answers."""
    model: str
    """What the server calls it; replaces the ``model`` of every request. Empty: requests keep theirs."""
    key: SecretStr | None
    """Sent as a bearer; it never enters a sandbox or a record."""


class _Provider(NamedTuple):
    url: str
    variables: str
    """What its environment variables begin with: ``…_API_KEY`` for the key, ``…_API_BASE`` or ``…_BASE_URL``."""
    more_keys: tuple[str, ...] = ()
    """Other variables in which people keep the key."""
    root: bool = False
    """Whether the URL variable is customarily the server's root, to which ``/v1`` is added."""

    @property
    def key_names(self) -> tuple[str, ...]:
        return (f"{self.variables}_API_KEY", *self.more_keys)

    @property
    def needs_key(self) -> bool:
        return not self.url.startswith("http://127.0.0.1:")


_PROVIDERS: dict[str, _Provider] = {
    "openai": _Provider("https://api.openai.com/v1", "OPENAI"),
    "anthropic": _Provider("https://api.anthropic.com/v1", "ANTHROPIC", root=True),
    "gemini": _Provider("https://generativelanguage.googleapis.com/v1beta/openai", "GEMINI", ("GOOGLE_API_KEY",)),
    "groq": _Provider("https://api.groq.com/openai/v1", "GROQ"),
    "mistral": _Provider("https://api.mistral.ai/v1", "MISTRAL"),
    "deepseek": _Provider("https://api.deepseek.com/v1", "DEEPSEEK"),
    "together_ai": _Provider("https://api.together.xyz/v1", "TOGETHER_AI", ("TOGETHERAI_API_KEY", "TOGETHER_API_KEY")),
    "fireworks_ai": _Provider("https://api.fireworks.ai/inference/v1", "FIREWORKS_AI", ("FIREWORKS_API_KEY",)),
    "openrouter": _Provider("https://openrouter.ai/api/v1", "OPENROUTER"),
    "xai": _Provider("https://api.x.ai/v1", "XAI"),
    "hosted_vllm": _Provider("http://127.0.0.1:8000/v1", "HOSTED_VLLM"),
    "vllm": _Provider("http://127.0.0.1:8000/v1", "VLLM"),
    "sglang": _Provider("http://127.0.0.1:30000/v1", "SGLANG"),
    "ollama": _Provider("http://127.0.0.1:11434/v1", "OLLAMA", root=True),
    "ollama_chat": _Provider("http://127.0.0.1:11434/v1", "OLLAMA", root=True),
    "lm_studio": _Provider("http://127.0.0.1:1234/v1", "LM_STUDIO"),
    "litellm_proxy": _Provider("http://127.0.0.1:4000/v1", "LITELLM_PROXY", root=True),
}

_BARE = {
    **dict.fromkeys(("gpt-", "chatgpt-", "o1", "o3", "o4"), "openai"),
    "claude-": "anthropic",
    "gemini-": "gemini",
}
"""Providers of names that are customarily written without one."""


def resolve_policy(
    model_path: str, *, policy_url: str | None, model: str | None, key_env: str | None, environ: Mapping[str, str]
) -> Policy:
    """Find the server, the model name and the key that a ``model_path`` stands for.

    :param model_path: ``provider/model`` as LiteLLM writes it; with ``policy_url`` any name.
    :param policy_url: base URL that replaces the provider's own, as the server has it (``http://host:8000/v1``).
    :param model: name that replaces the one in ``model_path``.
    :param key_env: name of the variable that holds the key, instead of the provider's own.
    :param environ: where variables are looked up.
    :raises ConfigError: an unknown provider, an empty name, or a URL that is none.
    :raises SecretsError: a key that is needed has no value.
    """
    path = model_path.strip()
    prefix, _, rest = path.partition("/")
    if not rest or prefix not in _PROVIDERS:
        bare = "" if "/" in path else next((owner for start, owner in _BARE.items() if path.startswith(start)), "")
        prefix, rest = bare, path
    provider = _PROVIDERS.get(prefix)
    name = (model or rest).strip()
    if not name:
        raise ConfigError("the model has no name", hint="Write model_path as provider/model, e.g. openai/gpt-5-mini.")
    if policy_url is not None:
        url = base_url(policy_url, "--policy-url")
    elif provider is not None:
        url = _own_url(provider, environ)
    else:
        raise ConfigError(
            f"model_path {model_path!r} names no provider that is known here",
            hint=f"Known: {', '.join(f'{known}/' for known in _PROVIDERS)}. "
            "Any other OpenAI-compatible server works with --policy-url.",
        )
    needs_key = provider is not None and provider.needs_key and policy_url is None
    key = _key(provider.key_names if provider else (), key_env, environ, needs_key=needs_key)
    return Policy(name=path, base_url=url, model=name, key=key)


def _own_url(provider: _Provider, environ: Mapping[str, str]) -> str:
    for variable in (f"{provider.variables}_API_BASE", f"{provider.variables}_BASE_URL"):
        if value := environ.get(variable, "").strip():
            url = base_url(value, variable)
            return f"{url}/v1" if provider.root and URL(url).path in ("", "/") else url
    return provider.url


def base_url(value: str, source: str) -> str:
    """An OpenAI-compatible server's base URL as ``Policy`` has it.

    :param source: where the value comes from, for the message.
    :raises ConfigError: it is none.
    """
    hint = "For example http://127.0.0.1:8000/v1. A key belongs into a variable that --policy-key-env names."
    try:
        url = URL(value.strip())
        is_base = url.scheme in ("http", "https") and url.host and url.port
    except ValueError as error:
        raise ConfigError(f"{source} is not a URL: {error}", hint=hint) from error
    if not is_base or url.user or url.password or url.query_string or url.fragment:
        raise ConfigError(f"{source} must be an http or https URL without credentials, query and fragment", hint=hint)
    return str(url).rstrip("/").removesuffix("/chat/completions")


def _key(
    names: tuple[str, ...], key_env: str | None, environ: Mapping[str, str], *, needs_key: bool
) -> SecretStr | None:
    for name in (key_env,) if key_env else names:
        if value := environ.get(name, "").strip():
            if not value.isascii() or not value.isprintable():
                raise SecretsError(f"the key in {name} holds characters that cannot be sent in a header")
            return SecretStr(value)
    if key_env:
        raise SecretsError(f"--policy-key-env names {key_env}, which has no value", hint=f"export {key_env}=…")
    if needs_key:
        raise SecretsError(
            f"the policy needs a key and {names[0]} has no value",
            hint=f"export {names[0]}=…, or name another variable with --policy-key-env.",
        )
    return None
