"""Data curation: raw documents → clean shards that `lmworks data prepare` reads."""
