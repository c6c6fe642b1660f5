"""A sandbox's model call: parsed, checked, and rewritten for the policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json

_CONTROL_TEXT = """
    account_id additional_drop_params anthropic_workspace_id anthropic-workspace-id api_base api_key api_type
    api_version apikey base_model base_url callbacks client_id client_secret config credentials
    custom_endpoint custom_llm_provider default_headers deployment_id deployment_url drop_params endpoint_url
    engine extra_headers failure_callback fallbacks context_window_fallbacks content_policy_fallbacks hf_token
    mock_delay mock_response mock_timeout mock_tool_calls mock_testing_fallbacks model_id model_list models
    num_retries organization original_function predibase_tenant_id preset project_id proxy_server_request
    region region_name route secret_fields space_id ssl_verify success_callback tenant_id token_url url
    use_in_pass_through use_psc_endpoint_format user_agent user_api_key_end_user_id user_config workspace_id
    wx_credentials zen_api_key
"""
_CONTROL_FIELDS = frozenset(_CONTROL_TEXT.split())
_CONTROL_PREFIXES = (
    *("_", "litellm_", "aws_", "azure_", "vertex_", "watsonx_", "sagemaker_", "oci_", "wx_", "s3_"),
    *("braintrust_", "langfuse_", "langsmith_", "lunary_", "posthog_", "slack_", "databricks_"),
)
"""Fields that gateways take as routing, credentials or callbacks: a sandbox must not reach them through the relay."""


class Refusal(Exception):
    """Raised when the relay itself refuses a request; carries what the sandbox is told."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message

    def body(self) -> bytes:
        return error_body(self.status, self.code, self.message)


class ModelCall(NamedTuple):
    """One call as the policy will see it."""

    chat: bool
    """Whether it is ``/chat/completions`` rather than ``/completions``."""
    stream: bool
    fields: dict[str, Any]
    body: bytes


def error_body(status: int, code: str, message: str) -> bytes:
    """An error in the shape that OpenAI clients read."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status)
    kind = kind or ("invalid_request_error" if status < 500 else "policy_error")
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


def load_json(data: bytes) -> Any:
    """JSON that can be written to a journal again: no NaN, at most 200 levels, no lone surrogates (replaced by "?").

    :raises ValueError: when it is not that.
    """
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError:
        if b"\\ud" not in data and b"\\uD" not in data:
            raise
    try:
        text = json.dumps(json.loads(data), ensure_ascii=False)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return from_json(text.encode("utf-8", "replace"), allow_inf_nan=False)


def parse_call(raw: bytes, *, chat: bool, model: str, sampling: Mapping[str, Any], ask_usage: bool) -> ModelCall:
    """Check a request body and write the policy's: its model, the defaults, everything else as it came.

    The body is written anew from what was parsed, so that the policy cannot read it differently than it was checked.

    :raises Refusal: not a JSON object, ``n`` above 1, or a field that would override routing or credentials.
    """
    try:
        fields = load_json(raw)
    except ValueError as error:
        raise Refusal(400, "invalid_json", f"The request body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise Refusal(400, "invalid_json", "The request body must be a JSON object")
    extra = fields.pop("extra_body", None)
    if extra is not None:
        if not isinstance(extra, dict):
            raise Refusal(400, "invalid_request", "extra_body must be a JSON object")
        fields |= extra
    if fields.get("n") not in (None, 1) or fields.get("n") is True or fields.get("best_of") not in (None, 1):
        raise Refusal(400, "invalid_request", "Only n=1 is supported: a rollout is one conversation")
    blocked = sorted(key for key in fields if key in _CONTROL_FIELDS or key.startswith(_CONTROL_PREFIXES))
    if blocked or "extra_body" in fields:
        names = ", ".join(blocked) or "extra_body"
        raise Refusal(400, "invalid_request", f"Request fields cannot override the relay's configuration: {names}")
    stream = fields.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise Refusal(400, "invalid_request", "stream must be true or false")
    fields["model"] = model or fields.get("model") or "osmosis-rollout"
    for key, value in sampling.items():
        other = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}.get(key, key)
        if fields.get(key) is None and fields.get(other) is None:
            fields[key] = value
    if stream and ask_usage and fields.get("stream_options") is None:
        fields["stream_options"] = {"include_usage": True}
    return ModelCall(chat, bool(stream), fields, to_json(fields))
