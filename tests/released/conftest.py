"""What writes the files of a release lies beside the tests that read them, as it is run by hand."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
