"""What the management commands do with files, terminals and tables. They parse arguments and call one function here."""
