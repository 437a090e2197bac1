import sys

from commandbus.spark.cli import main

sys.exit(main())
