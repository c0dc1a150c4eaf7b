"""A thin synchronous client of the gRPC service TenantAdmin."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.cli.clients.admin import AdminClient
from gateway.pb import tenants_pb2 as pb
from gateway.pb import tenants_pb2_grpc as pb_grpc


class TenantsClient(AdminClient):
    def __init__(self, target: str, key: str) -> None:
        super().__init__(target, key)
        self._stub = pb_grpc.TenantAdminStub(self._channel)

    def create(self, name: str, fields: pb.TenantFields) -> pb.Tenant:
        return self._stub.CreateTenant(pb.CreateTenantRequest(name=name, fields=fields), metadata=self._metadata)

    def update(self, name: str, fields: pb.TenantFields) -> pb.Tenant:
        return self._stub.UpdateTenant(pb.UpdateTenantRequest(name=name, fields=fields), metadata=self._metadata)

    def tenants(self) -> Sequence[pb.Tenant]:
        return self._stub.ListTenants(pb.ListTenantsRequest(), metadata=self._metadata).tenants

    def tenant(self, name: str) -> pb.Tenant:
        return self._stub.GetTenant(pb.GetTenantRequest(name=name), metadata=self._metadata)

    def disable(self, name: str, *, enable: bool) -> pb.Tenant:
        return self._stub.DisableTenant(pb.DisableTenantRequest(name=name, enable=enable), metadata=self._metadata)

    def delete(self, name: str) -> int:
        """Delete a tenant and its keys. Returns the number of keys deleted."""
        return self._stub.DeleteTenant(pb.DeleteTenantRequest(name=name), metadata=self._metadata).keys

    def create_key(self, tenant: str, label: str) -> pb.NewKey:
        return self._stub.CreateKey(pb.CreateKeyRequest(tenant=tenant, label=label), metadata=self._metadata)

    def keys(self, tenant: str) -> Sequence[pb.Key]:
        return self._stub.ListKeys(pb.ListKeysRequest(tenant=tenant), metadata=self._metadata).keys

    def rotate(self, key_id: str, *, keep: bool) -> pb.NewKey:
        return self._stub.RotateKey(pb.RotateKeyRequest(id=key_id, keep=keep), metadata=self._metadata)

    def disable_key(self, key_id: str, *, enable: bool) -> pb.Key:
        return self._stub.DisableKey(pb.DisableKeyRequest(id=key_id, enable=enable), metadata=self._metadata)

    def delete_key(self, key_id: str) -> None:
        self._stub.DeleteKey(pb.DeleteKeyRequest(id=key_id), metadata=self._metadata)
