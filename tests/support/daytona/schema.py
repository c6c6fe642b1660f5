"""What the service accepts, refused as strictly as the service does it, and the envelope of its errors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

API, DAEMON, PROXY = "DAYTONA_API", "DAYTONA_DAEMON", "DAYTONA_PROXY"
MAX_NAME = 255
"""Names and labels; the service's own bound is not documented."""
SNAPSHOT_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.:/-]*")

_CODES = {
    400: "BAD_REQUEST", 401: "UNAUTHORIZED", 403: "FORBIDDEN", 404: "NOT_FOUND", 408: "REQUEST_TIMEOUT",
    409: "CONFLICT", 410: "GONE", 429: "TOO_MANY_REQUESTS", 500: "INTERNAL_SERVER_ERROR", 502: "BAD_GATEWAY",
    503: "SERVICE_UNAVAILABLE",
}  # fmt: skip


class ApiError(Exception):
    """An answer that is an error envelope."""

    def __init__(
        self, status: int, message: str, *, code: str = "", source: str = API, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code or _CODES.get(status, "ERROR")
        self.source = source
        self.headers = dict(headers or {})

    def envelope(self, method: str, path: str, timestamp: str) -> dict[str, Any]:
        return {
            "statusCode": self.status, "message": self.message, "code": self.code, "source": self.source,
            "method": method, "path": path, "timestamp": timestamp,
        }  # fmt: skip


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", alias_generator=to_camel)


Text = Annotated[str, Field(max_length=MAX_NAME)]
Labels = dict[Annotated[str, Field(min_length=1, max_length=MAX_NAME)], Text]
GiB = Annotated[int, Field(ge=1)]
Minutes = Annotated[int, Field(ge=0)]


class BuildInfo(_Body):
    dockerfile_content: Annotated[str, Field(min_length=1)]
    context_hashes: list[str] | None = None


class Volume(_Body):
    volume_id: str
    mount_path: str
    subpath: str | None = None


class CreateSandbox(_Body):
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None
    snapshot: str | None = None
    user: Text | None = None
    env: dict[str, str] | None = None
    labels: Labels | None = None
    public: bool | None = None
    network_block_all: bool | None = None
    kvm: bool | None = None
    network_allow_list: str | None = None
    domain_allow_list: str | None = None
    outbound_proxy_url: str | None = None
    otel_endpoint_override: str | None = None
    target: str | None = None
    cpu: GiB | None = None
    gpu: Annotated[int, Field(ge=0)] | None = None
    gpu_type: list[str] | None = None
    spot: bool | None = None
    memory: GiB | None = None
    disk: GiB | None = None
    auto_stop_interval: Minutes | None = None
    auto_pause_interval: Minutes | None = None
    auto_archive_interval: Minutes | None = None
    auto_delete_interval: Annotated[int, Field(ge=-1)] | None = None
    ttl_minutes: Minutes | None = None
    queue_timeout: Minutes | None = None
    volumes: list[Volume] | None = None
    build_info: BuildInfo | None = None
    linked_sandbox: str | None = None
    secrets: list[dict[str, str]] | None = None


class CreateSnapshot(_Body):
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    image_name: str | None = None
    entrypoint: list[str] | None = None
    cpu: GiB | None = None
    gpu: Annotated[int, Field(ge=0)] | None = None
    gpu_type: list[str] | None = None
    memory: GiB | None = None
    disk: GiB | None = None
    build_info: BuildInfo | None = None
    region_id: str | None = None
    sandbox_class: str | None = None


class SetLabels(_Body):
    labels: Labels


class NetworkSettings(_Body):
    network_block_all: bool | None = None
    network_allow_list: str | None = None
    domain_allow_list: str | None = None


class Execute(_Body):
    command: str
    cwd: str | None = None
    envs: dict[str, str] | None = None
    timeout: Annotated[int, Field(ge=0)] | None = None


class CreateSession(_Body):
    session_id: Annotated[str, Field(min_length=1)]


class SessionExecute(_Body):
    command: Annotated[str, Field(min_length=1)]
    run_async: bool | None = None
    # The older name of the same, which the service still takes.
    var_async: bool | None = Field(default=None, alias="async")
    suppress_input_echo: bool | None = None


class SessionInput(_Body):
    data: str


class PtyResize(_Body):
    cols: Annotated[int, Field(ge=1, le=1000)]
    rows: Annotated[int, Field(ge=1, le=1000)]


class Download(_Body):
    paths: Annotated[list[str], Field(min_length=1)]


def parse[Model: _Body](model: type[Model], body: bytes, source: str = API) -> Model:
    """
    :raises ApiError: 400, naming each field that is wrong or unknown.
    """
    try:
        data = json.loads(body)
    except ValueError as error:
        raise ApiError(400, f"Request body is not valid JSON: {error}", source=source) from error
    try:
        return model.model_validate_json(json.dumps(data))
    except ValidationError as error:
        problems = []
        for each in error.errors():
            where = ".".join(map(str, each["loc"]))
            unknown = each["type"] == "extra_forbidden"
            problems.append(f"property {where} should not exist" if unknown else f"{where}: {each['msg']}")
        raise ApiError(400, "; ".join(problems), source=source) from error


def check_network(block: bool | None, cidrs: str | None, domains: str | None) -> None:
    """
    :raises ApiError: kinds of rules that exclude each other, or a list that is not one.
    """
    if sum(map(bool, (block, cidrs, domains))) > 1:
        raise ApiError(400, "networkBlockAll, networkAllowList and domainAllowList are mutually exclusive")
    for cidr in (cidrs or "").split(",") if cidrs else []:
        if not re.fullmatch(r"\d{1,3}(\.\d{1,3}){3}/\d{1,2}", cidr.strip()):
            raise ApiError(400, f'Invalid CIDR in networkAllowList: "{cidr}". IPv4 CIDR blocks only')
    for domain in (domains or "").split(",") if domains else []:
        if not re.fullmatch(r"(\*\.)?[a-zA-Z0-9-]+(\.[a-zA-Z0-9-]+)+", domain.strip()):
            raise ApiError(400, f'Invalid domain in domainAllowList: "{domain}"')
