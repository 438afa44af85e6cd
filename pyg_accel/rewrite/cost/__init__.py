"""What primitives cost: learned models, and a roofline where there are none."""
