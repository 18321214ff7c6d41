"""These tests are collected only where Triton is its own interpreter from the start: see ../test_interpreted.py."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
