"""The host's end of the wire: streams and messages over a sandbox's byte stream, and the guest as an object."""

from harness.channel.channel import Channel, ChannelStream
from harness.channel.guest import Ended, ErrorInfo, Guest, Loaded, Probed

__all__ = ["Channel", "ChannelStream", "Ended", "ErrorInfo", "Guest", "Loaded", "Probed"]
