"""Device code, and nothing else: modules here import Triton and are imported when first used."""
