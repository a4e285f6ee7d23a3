"""Form to Form, where products of blocks follow each other: how they are added up, and which become several."""
