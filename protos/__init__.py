"""The only language that kvferry's processes share: protobuf messages and gRPC services."""
