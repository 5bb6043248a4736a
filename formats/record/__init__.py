"""What a conversion decided and wrote, set down for programs and for people: recipe, manifest, model card."""
