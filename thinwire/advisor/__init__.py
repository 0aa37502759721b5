"""Which method to train with on these machines: measured links, machines and models, and what follows."""
