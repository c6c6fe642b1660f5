# Command: python -m harness run configs/eval/<your-rollout>.toml

[experiment]
rollout = "<your-rollout>"
entrypoint = "main.py"
model_path = "openai/gpt-5-mini"
dataset = "<your-rollout>"
# branch = "my-feature"            # pin what the platform runs (or commit_sha, not both)

[evaluation]
# limit = 200                      # first rows only
# n = 1                            # attempts per row
# pass_threshold = 1.0
agent_workflow_timeout_s = 450
grader_timeout_s = 150

# [env]                            # plain variables for the workflow and the grader
# LOG_LEVEL = "INFO"

[secrets]                          # names only; what the grader needs. The policy's key is not among them.
required = []
