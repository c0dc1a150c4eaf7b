#!/bin/sh
# Make an authority, and certificates for gateways and engines, in FOLDER:
#
#   deploy/certificates.sh FOLDER [ENGINE...]
#
# ENGINE is a host name under which gateways reach an engine: engine-1 and engine-2 by default, as in compose.yaml; in
# Kubernetes, '*.NAME.NAMESPACE.svc.cluster.local' for all pods of a headless Service. FOLDER/gateway and FOLDER/engine
# then each hold ca.crt, tls.crt and tls.key, which are the names that a Secret of type kubernetes.io/tls has; all
# engines share a certificate. FOLDER/authority/ca.key signs more of them: keep it elsewhere.
#
# A second run keeps the authority, and replaces the certificates; engines use the new ones from the next connection.
set -eu

DAYS_AUTHORITY=3650
DAYS=365

if [ $# -lt 1 ]; then
  echo "usage: $0 FOLDER [ENGINE...]" >&2
  exit 2
fi
folder=$1
shift
[ $# -gt 0 ] || set -- engine-1 engine-2

# Containers run as another user, so the keys below are readable; FOLDER itself keeps other users of this machine out.
mkdir -p "$folder/authority"
chmod 700 "$folder" "$folder/authority"
umask 077

if [ ! -f "$folder/authority/ca.key" ]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -sha256 -days "$DAYS_AUTHORITY" \
    -subj "/CN=loralane authority" \
    -addext "basicConstraints=critical,CA:TRUE,pathlen:0" -addext "keyUsage=critical,keyCertSign,cRLSign" \
    -keyout "$folder/authority/ca.key" -out "$folder/authority/ca.crt"
fi

# issue NAME USAGE NAMES: a key and a certificate in FOLDER/NAME, for subjectAltName NAMES.
issue() {
  place=$folder/$1
  mkdir -p "$place"
  extensions=$(mktemp)
  printf 'basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\nextendedKeyUsage=%s\nsubjectAltName=%s\n' \
    "$2" "$3" > "$extensions"
  openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -sha256 -subj "/CN=loralane $1" \
    -keyout "$place/tls.key.new" -out "$place/tls.csr"
  openssl x509 -req -in "$place/tls.csr" -days "$DAYS" -sha256 -extfile "$extensions" \
    -CA "$folder/authority/ca.crt" -CAkey "$folder/authority/ca.key" -CAcreateserial -out "$place/tls.crt.new"
  rm -f "$extensions" "$place/tls.csr"
  cp "$folder/authority/ca.crt" "$place/ca.crt"
  mv "$place/tls.key.new" "$place/tls.key"
  mv "$place/tls.crt.new" "$place/tls.crt"
  chmod 755 "$place"
  chmod 644 "$place/ca.crt" "$place/tls.crt" "$place/tls.key"
}

names=DNS:localhost,IP:127.0.0.1
for engine in "$@"; do
  names=$names,DNS:$engine
done
issue engine serverAuth,clientAuth "$names"
issue gateway clientAuth DNS:gateway
echo "certificates for $* are in $folder"
