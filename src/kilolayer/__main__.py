"""python -m kilolayer: the same as the command `kilolayer`."""

import sys

from kilolayer.cli.main import main

sys.exit(main())
