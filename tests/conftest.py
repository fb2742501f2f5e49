"""Shared by all tests."""

import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # as the `tune` command does: see components/cli.py
