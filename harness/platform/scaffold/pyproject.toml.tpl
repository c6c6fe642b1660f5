[project]
name = "<your-rollout>"
description = "A rollout to fill in."
version = "0.1.0"
requires-python = ">=3.12"
dependencies = [
    "osmosis-ai[server]>=0.3.8,<0.4",
]

[build-system]
requires = ["setuptools>=61.0"]
build-backend = "setuptools.build_meta"

[tool.setuptools]
py-modules = []
