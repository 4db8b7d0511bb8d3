#!/bin/sh
# Write the passwords of Postgres and of the S3 store, one a folder: the given ones, else random ones that are made at the first start.
# usage: make_passwords.sh FOLDER
set -eu
write() {
  file=$1/password
  if [ -n "$2" ]; then
    printf '%s' "$2" >"$file.new"
  elif [ ! -s "$file" ]; then
    head -c 24 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$file.new"
  else
    return 0
  fi
  chmod 444 "$file.new" # the services that mount the folder have users of their own
  mv -f "$file.new" "$file"
}
write "$1/postgres" "${POSTGRES_PASSWORD:-}"
write "$1/s3" "${S3_PASSWORD:-}"
