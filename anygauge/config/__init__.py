"""What a run is: a YAML file and overrides, checked, as one frozen object.

In the order in which a run file passes through them:

- `load`: reads the file, what it extends and the command line.
- `document`, `tree`: YAML text, and what it becomes: values that know their line.
- `strategies`, `paths`: the fields of each strategy, absolute paths.
- `schema`, `sections`: what each field takes; pydantic checks a run against them.
- `problems`, `describe`: complaints, and the schema in words.
- `resolved`: the result as text, for ranks and for people.
"""
