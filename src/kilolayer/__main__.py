"""`python -m kilolayer` is the same as the command `kilolayer`."""

import sys

from kilolayer.cli.main import main

sys.exit(main())
