"""Helper modules lie beside the tests; pytest's importlib mode puts no folder on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
