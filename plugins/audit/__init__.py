"""Who changed what is served, when and on what evidence: entries whose chain shows tampering."""
