"""What tests of virtual devices share: a virtual clock, mutants of the engine, and operators that must agree."""
