"""DeepSpeed's pipeline engine, fed with packs and cut where the plan says."""
