"""The object storage that build contexts are uploaded to: as much of S3 as the SDK's client speaks.

That client takes no address without TLS, so a test that uses this allows it one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable

from aiohttp import web

from .schema import ApiError
from .world import World

BUCKET = "contexts"


class Storage:
    def __init__(self, world: World, organization: str, urls: Callable[[str], str]) -> None:
        self._world = world
        self._organization = organization
        self._urls = urls
        self._access = secrets.token_hex(8)
        self._session = secrets.token_hex(16)
        self._uploads: dict[str, dict[int, bytes]] = {}

    def routes(self) -> list[web.RouteDef]:
        key = f"/storage/{BUCKET}/{self._organization}/{{hash}}/context.tar"
        return [
            web.get("/api/object-storage/push-access", self.push_access),
            web.head(key, self.head),
            web.post(key, self.upload),
            web.put(key, self.put_part),
        ]

    async def push_access(self, request: web.Request) -> web.Response:
        return web.json_response({
            "accessKey": self._access, "secret": secrets.token_hex(16), "sessionToken": self._session,
            "storageUrl": self._urls("storage"), "organizationId": self._organization, "bucket": BUCKET, "region": "us",
        })  # fmt: skip

    def _authorize(self, request: web.Request) -> None:
        known = f"Credential={self._access}/" in request.headers.get("Authorization", "")
        if not known or request.headers.get("X-Amz-Security-Token") != self._session:
            raise ApiError(403, "The AWS Access Key Id you provided does not exist in our records.")

    async def head(self, request: web.Request) -> web.Response:
        self._authorize(request)
        data = self._world.contexts.get(request.match_info["hash"])
        if data is None:
            raise ApiError(404, "The specified key does not exist.")
        return web.Response(body=data, headers={"ETag": '"-"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"})

    async def upload(self, request: web.Request) -> web.Response:
        """Begin an upload in parts, or end it."""
        self._authorize(request)
        if (number := request.query.get("uploadId")) is None:
            number = secrets.token_hex(8)
            self._uploads[number] = {}
            return _xml("InitiateMultipartUploadResult", UploadId=number)
        parts = self._uploads.pop(number)
        listed = [int(each) for each in re.findall(r"<PartNumber>(\d+)<", await request.text())]
        self._world.contexts[request.match_info["hash"]] = b"".join(parts[each] for each in listed)
        return _xml("CompleteMultipartUploadResult", ETag='"-"')

    async def put_part(self, request: web.Request) -> web.Response:
        self._authorize(request)
        parts = self._uploads[request.query["uploadId"]]
        parts[int(request.query["partNumber"])] = await request.read()
        return web.Response(headers={"ETag": '"-"'})


def _xml(kind: str, **values: str) -> web.Response:
    inside = "".join(f"<{name}>{value}</{name}>" for name, value in values.items())
    text = f"<{kind}><Bucket>{BUCKET}</Bucket><Key>-</Key>{inside}</{kind}>"
    return web.Response(text=text, content_type="application/xml")
