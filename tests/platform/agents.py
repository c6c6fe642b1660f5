"""A scripted model for the agents that multiply with a tool."""

from __future__ import annotations

import re
from typing import Any

from tests.support.policy import Reply


def text_of(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content or [])


def multiplies_with_a_tool(body: dict[str, Any]) -> Reply:
    """Calls the tool with the two numbers, then repeats what the tool said."""
    messages = body["messages"]
    numbers = re.findall(r"\d+", next((text_of(m["content"]) for m in messages if m["role"] == "user"), ""))
    if messages[-1]["role"] == "tool":
        return Reply(f"#### {float(re.findall(r'[\d.]+', text_of(messages[-1]['content']))[0]):g}")
    if len(numbers) < 2 or not body.get("tools"):
        return Reply("hello")
    name = body["tools"][0]["function"]["name"]
    return Reply(tools=((name, {"a": int(numbers[0]), "b": int(numbers[1])}),))
