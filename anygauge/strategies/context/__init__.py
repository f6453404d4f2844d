"""Context parallelism: ranks have parts of every sequence."""
