#!/bin/sh
# Makes images without a registry: tasuki-base (Debian's files), tasuki-prometheus and fullstorydev/grpcurl on it. Needs root and debootstrap.
# sh tests/containers/base.sh [CA.pem]; then make containers BASE=tasuki-base PROMETHEUS_IMAGE=tasuki-prometheus
# The authorities of CA.pem are in the image as /opt/ca.pem: for a proxy that needs them, copy them there on this machine, too, and set
# PIP_CERT and SSL_CERT_FILE to that path for make.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
debootstrap --variant=minbase bookworm "$folder/debian" http://deb.debian.org/debian >/dev/null
tar --directory "$folder/debian" --create . | docker import - tasuki-base:debian
mkdir "$folder/context"
cp "${1:-/etc/ssl/certs/ca-certificates.crt}" "$folder/context/ca.pem"
# uv's cache would lie on the disk as large as the image.
printf 'FROM tasuki-base:debian\nCOPY ca.pem /opt/ca.pem\nENV UV_NO_CACHE=1\n' >"$folder/context/Dockerfile"
docker build --tag tasuki-base "$folder/context"
printf 'FROM tasuki-base\nRUN apt-get update && apt-get install --yes --no-install-recommends prometheus\nENTRYPOINT ["prometheus"]\n' |
    docker build --tag tasuki-prometheus -
cp "$root/.tools/grpcurl" "$folder/context/"
printf 'FROM tasuki-base\nCOPY grpcurl /bin/grpcurl\nENTRYPOINT ["grpcurl"]\n' >"$folder/context/Dockerfile"
docker build --tag fullstorydev/grpcurl "$folder/context"
