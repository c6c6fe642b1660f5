"""From a LiteLLM-style ``model_path`` to a URL, a model name and a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pydantic import Field, SecretStr
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
    headers: dict[str, str] = Field(default_factory=dict)
    """Sent with every request, beside the key."""


class _Provider(NamedTuple):
    url: str
    key_names: tuple[str, ...]
    url_names: tuple[str, ...]
    needs_key: bool = True
    root: bool = False
    """Whether the provider's own URL variable is customarily the server's root, to which ``/v1`` is added."""


def _hosted(url: str, prefix: str, *more_keys: str) -> _Provider:
    return _Provider(url, (f"{prefix}_API_KEY", *more_keys), (f"{prefix}_API_BASE", f"{prefix}_BASE_URL"))


def _served(url: str, prefix: str, *, root: bool = False) -> _Provider:
    return _hosted(url, prefix)._replace(needs_key=False, root=root)


_PROVIDERS: dict[str, _Provider] = {
    "openai": _hosted("https://api.openai.com/v1", "OPENAI"),
    "anthropic": _hosted("https://api.anthropic.com/v1", "ANTHROPIC")._replace(root=True),
    "gemini": _hosted("https://generativelanguage.googleapis.com/v1beta/openai", "GEMINI", "GOOGLE_API_KEY"),
    "groq": _hosted("https://api.groq.com/openai/v1", "GROQ"),
    "mistral": _hosted("https://api.mistral.ai/v1", "MISTRAL"),
    "deepseek": _hosted("https://api.deepseek.com/v1", "DEEPSEEK"),
    "together_ai": _hosted("https://api.together.xyz/v1", "TOGETHER_AI", "TOGETHERAI_API_KEY", "TOGETHER_API_KEY"),
    "fireworks_ai": _hosted("https://api.fireworks.ai/inference/v1", "FIREWORKS_AI", "FIREWORKS_API_KEY"),
    "openrouter": _hosted("https://openrouter.ai/api/v1", "OPENROUTER"),
    "xai": _hosted("https://api.x.ai/v1", "XAI"),
    "hosted_vllm": _served("http://127.0.0.1:8000/v1", "HOSTED_VLLM"),
    "vllm": _served("http://127.0.0.1:8000/v1", "VLLM"),
    "sglang": _served("http://127.0.0.1:30000/v1", "SGLANG"),
    "ollama": _served("http://127.0.0.1:11434/v1", "OLLAMA", root=True),
    "ollama_chat": _served("http://127.0.0.1:11434/v1", "OLLAMA", root=True),
    "lm_studio": _served("http://127.0.0.1:1234/v1", "LM_STUDIO"),
    "litellm_proxy": _served("http://127.0.0.1:4000/v1", "LITELLM_PROXY", root=True),
}

_BARE = {"gpt-": "openai", "chatgpt-": "openai", "o1": "openai", "o3": "openai", "o4": "openai"} | {
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
    prefix, _, rest = model_path.strip().partition("/")
    provider = _PROVIDERS.get(prefix) if rest else None
    if provider is None:
        rest = model_path.strip()
        prefix = next((owner for start, owner in _BARE.items() if rest.startswith(start) and "/" not in rest), "")
        provider = _PROVIDERS.get(prefix)
    name = (model or rest).strip()
    if not name:
        raise ConfigError("the model has no name", hint="Write model_path as provider/model, e.g. openai/gpt-5-mini.")
    if provider is None and policy_url is None:
        raise ConfigError(
            f"model_path {model_path!r} names no provider that is known here",
            hint=f"Known: {', '.join(f'{known}/' for known in _PROVIDERS)}. "
            "Any other OpenAI-compatible server works with --policy-url.",
        )
    url = base_url(policy_url, "--policy-url") if policy_url is not None else _own_url(provider, environ)
    return Policy(name=model_path.strip(), base_url=url, model=name, key=_key(provider, policy_url, key_env, environ))


def _own_url(provider: _Provider | None, environ: Mapping[str, str]) -> str:
    assert provider is not None
    for variable in provider.url_names:
        if value := environ.get(variable, "").strip():
            url = base_url(value, variable)
            return f"{url}/v1" if provider.root and URL(url).path in ("", "/") else url
    return provider.url


def base_url(value: str, source: str) -> str:
    """An OpenAI-compatible server's base URL as ``Policy`` has it.

    :param source: where the value comes from, for the message.
    :raises ConfigError: it is none.
    """
    try:
        url = URL(value.strip())
        port = url.port
    except ValueError as error:
        raise ConfigError(f"{source} is not a URL: {error}") from error
    if url.scheme not in ("http", "https") or not url.host or port is None:
        raise ConfigError(f"{source} must be an http or https URL", hint="For example http://127.0.0.1:8000/v1.")
    if url.user or url.password or url.query_string or url.fragment:
        raise ConfigError(
            f"{source} must not hold credentials, a query or a fragment",
            hint="Put the key into a variable and name it with --policy-key-env.",
        )
    return str(url).rstrip("/").removesuffix("/chat/completions")


def _key(
    provider: _Provider | None, policy_url: str | None, key_env: str | None, environ: Mapping[str, str]
) -> SecretStr | None:
    names = (key_env,) if key_env else provider.key_names if provider else ()
    for name in names:
        if value := environ.get(name, "").strip():
            if not value.isascii() or not value.isprintable():
                raise SecretsError(f"the key in {name} holds characters that cannot be sent in a header")
            return SecretStr(value)
    if key_env:
        raise SecretsError(f"--policy-key-env names {key_env}, which has no value", hint=f"export {key_env}=…")
    if provider is not None and provider.needs_key and policy_url is None:
        raise SecretsError(
            f"the policy needs a key and {names[0]} has no value",
            hint=f"export {names[0]}=…, or name another variable with --policy-key-env.",
        )
    return None
