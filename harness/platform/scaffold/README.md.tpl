# <your-rollout>

Fill in `Workflow.run` and `AnswerGrader.grade` in `main.py`, and the rows in `data/<your-rollout>.jsonl`.

```bash
python -m harness validate configs/eval/<your-rollout>.toml
python -m harness run configs/eval/<your-rollout>.toml
```
