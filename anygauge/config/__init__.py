"""What a run is: a YAML file and overrides, checked, as one frozen object.

In the order in which a run file passes through them:

- `document`: YAML text becomes a `tree` of values that know their line.
- `layers`: files, what they extend and the command line are merged into one tree.
- `strategies`, `paths`: shorthands of strategies are spelled out, paths made absolute.
- `schema`, `sections`: what each field takes; pydantic checks the values against them.
- `problems`, `describe`: pydantic's complaints, with places, in words of the schema.
- `load`: all of that in order.
- `resolved`, `yaml_text`: the result as text, for ranks and for people.
"""
