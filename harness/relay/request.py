"""A sandbox's model call: parsed, checked, and rewritten for the policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

_CONTROL_NAMES = """
    account_id additional_drop_params apikey base_model base_url callbacks client_id client_secret config
    content_policy_fallbacks context_window_fallbacks credentials custom_endpoint custom_llm_provider default_headers
    deployment_id deployment_url drop_params endpoint_url engine extra_body extra_headers failure_callback fallbacks
    hf_token model_id model_list models num_retries organization original_function preset project_id
    proxy_server_request region region_name route secret_fields space_id ssl_verify success_callback tenant_id
    token_url url user_agent user_config workspace_id zen_api_key
"""
_CONTROL_FIELDS = frozenset(_CONTROL_NAMES.split())
_CONTROL_PREFIXES = (
    *("_", "api_", "mock_", "litellm_", "aws_", "azure_", "vertex_", "watsonx_", "sagemaker_", "oci_", "wx_", "s3_"),
    *(
        "anthropic_workspace",
        "anthropic-workspace",
        "predibase_",
        "use_in_pass_through",
        "use_psc_",
        "user_api_key_",
        "extra_body",
    ),
    *("braintrust_", "langfuse_", "langsmith_", "lunary_", "posthog_", "slack_", "databricks_"),
)
"""Fields that gateways take as routing, credentials or callbacks: a sandbox must not reach them through the relay."""


class Refusal(Exception):
    """Raised when the relay itself refuses a request; carries what the sandbox is told."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


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


def parse_call(raw: bytes, *, model: str, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Check a request body and give the fields of the policy's: its model, the defaults, everything else as it came.

    The body is written anew from what was parsed, so that the policy cannot read it differently than it was checked.

    :raises Refusal: not a JSON object, ``n`` above 1, or a field that would override routing or credentials.
    """
    try:
        fields = load_json(raw)
    except ValueError as error:
        raise Refusal(400, "invalid_json", f"The request body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise Refusal(400, "invalid_json", "The request body must be a JSON object")
    extra = fields.pop("extra_body", None) or {}
    if not isinstance(extra, dict):
        raise Refusal(400, "invalid_request", "extra_body must be a JSON object")
    fields |= extra
    if fields.get("n") not in (None, 1) or fields.get("best_of") not in (None, 1):
        raise Refusal(400, "invalid_request", "Only n=1 is supported: a rollout is one conversation")
    blocked = [key for key in fields if key in _CONTROL_FIELDS or key.startswith(_CONTROL_PREFIXES)]
    if blocked:
        names = ", ".join(sorted(blocked))
        raise Refusal(400, "invalid_request", f"Request fields cannot override the relay's configuration: {names}")
    if fields.get("stream") not in (None, True, False):
        raise Refusal(400, "invalid_request", "stream must be true or false")
    fields["model"] = model or fields.get("model") or "osmosis-rollout"
    for key, value in sampling.items():
        other = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}.get(key, key)
        if fields.get(key) is None and fields.get(other) is None:
            fields[key] = value
    if fields.get("stream") and fields.get("stream_options") is None:
        fields["stream_options"] = {"include_usage": True}
    return fields
