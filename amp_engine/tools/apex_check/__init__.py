"""`--check`: reads a project's sources and lists its uses of apex, and how amp_engine answers each."""
