#!/bin/bash
# CANN's variables, then the server in this process's place, so that signals reach it.
for script in /usr/local/Ascend/{cann,ascend-toolkit,nnal/atb}/set_env.sh; do
    # shellcheck disable=SC1090
    if [ -r "$script" ]; then . "$script"; fi
done
driver=/usr/local/Ascend/driver/lib64  # mounted from the host
export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$driver:$driver/common:$driver/driver"
exec headrace serve --host 0.0.0.0 "$@"
