"""Parts of the library that Intel calls experimental."""
