#!/usr/bin/env python
"""Django's command line for example_project. Without DATABASE_URL it starts the embedded PostgreSQL first."""

import os
import sys

from django.core.management import execute_from_command_line

from example_project.database import provide_database


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    provide_database(sys.argv)
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
