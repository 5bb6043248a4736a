"""What a conversion decided and wrote, for programs and for people: recipe, manifest, masks, model card."""
