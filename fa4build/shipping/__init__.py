"""What leaves the house: manifests, packs, wheels, bundles, their signatures and inspection."""
