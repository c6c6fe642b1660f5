"""What a model_path stands for."""

from __future__ import annotations

import pytest

from harness.errors import ConfigError, SecretsError
from harness.policy.resolve import Policy, resolve_policy


def resolve(path: str, url: str | None = None, model: str | None = None, key: str | None = None, **env: str) -> Policy:
    return resolve_policy(path, policy_url=url, model=model, key_env=key, environ=env)


@pytest.mark.parametrize(
    ("path", "env", "url", "model"),
    [
        ("openai/gpt-5-mini", {"OPENAI_API_KEY": "k"}, "https://api.openai.com/v1", "gpt-5-mini"),
        ("gpt-5-mini", {"OPENAI_API_KEY": "k"}, "https://api.openai.com/v1", "gpt-5-mini"),
        ("openai/x", {"OPENAI_API_KEY": "k", "OPENAI_BASE_URL": "http://h:1/v1/"}, "http://h:1/v1", "x"),
        ("anthropic/c", {"ANTHROPIC_API_KEY": "k"}, "https://api.anthropic.com/v1", "c"),
        (
            "anthropic/c",
            {"ANTHROPIC_API_KEY": "k", "ANTHROPIC_API_BASE": "https://gate.example"},
            "https://gate.example/v1",
            "c",
        ),
        ("gemini/g", {"GOOGLE_API_KEY": "k"}, "https://generativelanguage.googleapis.com/v1beta/openai", "g"),
        ("openrouter/anthropic/c", {"OPENROUTER_API_KEY": "k"}, "https://openrouter.ai/api/v1", "anthropic/c"),
        ("hosted_vllm/Qwen/Q3", {"HOSTED_VLLM_API_BASE": "http://gpu:8000/v1"}, "http://gpu:8000/v1", "Qwen/Q3"),
        ("ollama/llama3", {}, "http://127.0.0.1:11434/v1", "llama3"),
        ("ollama_chat/llama3", {"OLLAMA_API_BASE": "http://box:11434"}, "http://box:11434/v1", "llama3"),
        ("sglang/m", {}, "http://127.0.0.1:30000/v1", "m"),
        ("litellm_proxy/m", {"LITELLM_PROXY_API_KEY": "k"}, "http://127.0.0.1:4000/v1", "m"),
    ],
)
def test_providers(path: str, env: dict[str, str], url: str, model: str) -> None:
    policy = resolve(path, **env)
    assert (policy.base_url, policy.model, policy.name) == (url, model, path)
    has_key = any(name.endswith("_KEY") for name in env)
    assert (policy.key.get_secret_value() if policy.key else None) == ("k" if has_key else None)


def test_url_and_model_override() -> None:
    policy = resolve("openai/a", url="http://127.0.0.1:9/v1/chat/completions", model="b")
    assert (policy.base_url, policy.model, policy.key) == ("http://127.0.0.1:9/v1", "b", None)
    assert resolve("meta-llama/L3", url="http://127.0.0.1:9/v1").model == "meta-llama/L3"
    assert resolve("hosted_vllm/meta-llama/L3", url="http://127.0.0.1:9/v1").model == "meta-llama/L3"


def test_named_key_wins_and_must_have_a_value() -> None:
    policy = resolve("openai/a", key="MINE", MINE="m" * 9, OPENAI_API_KEY="other")
    assert policy.key is not None
    assert policy.key.get_secret_value() == "m" * 9
    assert "m" * 9 not in repr(policy) + policy.model_dump_json()
    with pytest.raises(SecretsError, match="MINE"):
        resolve("openai/a", key="MINE", OPENAI_API_KEY="other")


@pytest.mark.parametrize(("path", "name"), [("openai/a", "OPENAI_API_KEY"), ("xai/g", "XAI_API_KEY")])
def test_missing_key_names_the_variable(path: str, name: str) -> None:
    with pytest.raises(SecretsError, match=name):
        resolve(path)


def test_key_that_is_no_header_is_refused_without_showing_it() -> None:
    with pytest.raises(SecretsError) as caught:
        resolve("openai/a", OPENAI_API_KEY="kéy\nx")
    assert "kéy" not in str(caught.value)


@pytest.mark.parametrize("path", ["azure/gpt", "nonsense", "", "a/b/c"])
def test_unknown_provider_lists_what_works(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(path)
    if path:
        assert "hosted_vllm/" in str(caught.value)
        assert "--policy-url" in str(caught.value)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://h/v1", "http://", "http://u:p@h/v1", "http://h/v1?key=x", "http://h:99999/", ""]
)
def test_urls_that_cannot_be_a_base(url: str) -> None:
    with pytest.raises(ConfigError, match="--policy-url"):
        resolve("openai/a", url=url)
