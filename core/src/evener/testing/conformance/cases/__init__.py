"""Generators of test cases, by family of ops. What ``OpSchema.cases`` names."""
