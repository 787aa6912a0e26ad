/* The device contract: everything Oxytorch asks of a device, as one plain C table.
 *
 * A backend is a shared library `liboxytorch-backend-<name>.so` that exports `oxy_backend_entry`, or is built in. The
 * same table serves both. This header and oxytorch/backend_kernels.h are all that a backend needs: C11 or C++, no
 * library to link, no C++ type, no exception across it. `oxytorch-conformance <library>` checks the clauses below and
 * cites them by their names.
 *
 * CONTRACT
 *  C1  `size` is sizeof(oxy_backend) as the backend was compiled; `api_version` is OXY_BACKEND_API_VERSION as it was
 *      compiled. Slots are only ever appended; an incompatible change raises the version. A host treats what lies
 *      behind `size` as NULL.
 *  C2  `name` is lower case letters, digits, '-' and '_'. No text is NULL unless its field says so; texts live as long
 *      as the process (`last_error`: see F1). The library is never unloaded.
 *  C3  Slots without "(optional)" are not NULL. The slots of the queue group are all present or all NULL. A device
 *      without them is synchronous: the host passes queue NULL, and every call is done when it returns.
 *  C4  A structure that a call fills carries `size`, set by the caller. The backend writes no byte behind `size` and
 *      refuses (OXY_INVALID_ARGUMENT) a size smaller than the structure of version 1.
 *  C5  `score` may be called first, often and from any thread; it gives the same answer each time, needs no device and
 *      never fails. 0 means unusable here; the reason then says in one sentence which thing is missing.
 *  C6  Nothing is thrown, no signal is raised, the process is never ended: every failure is a status.
 *
 * MEMORY
 *  M1  `alloc` gives `bytes` usable bytes aligned to `properties.alignment` (at least 64), owned by the caller until
 *      `free`. The contents are undefined. Offsets may be added to the pointer.
 *  M2  0 bytes: OXY_OK and a NULL pointer. `free` of NULL: OXY_OK. Copies and fills of 0 bytes: OXY_OK, nothing read.
 *  M3  More than there is: OXY_OUT_OF_MEMORY and a NULL pointer, for any 64-bit size; the device stays usable.
 *  M4  `memory_info.allocated_bytes` is what this backend holds for its callers on that device: it grows by at least
 *      the bytes of each live allocation of device memory and returns to its earlier value when they are freed.
 *  M5  `free` of a pointer that this device did not give, or gave and took back: OXY_INVALID_ARGUMENT where
 *      properties.flags has OXY_DEVICE_CHECKS_POINTERS; otherwise undefined.
 *  M6  Copies and fills touch exactly the bytes they were asked for. Ranges within one copy do not overlap.
 *  M7  The host keeps both ranges of a copy alive, and unchanged where they matter, until the copy is done.
 *
 * ORDER
 *  Q1  Work on one queue is done in the order of the calls, each seeing all effects of those before it.
 *  Q2  Work on two queues has no order, except by an event.
 *  Q3  `synchronize` returns when all work enqueued before the call is done: of one queue, or of the device's queues.
 *  Q4  A call with queue NULL is done when it returns. It has no order with work on queues.
 *  Q5  `queue_destroy` finishes the queue's work first.
 *  E1  `event_record` marks the point behind all work enqueued on that queue so far; recording again moves the mark.
 *      A wait asked for earlier keeps the mark it saw.
 *  E2  A queue that waits for an event starts nothing enqueued after the wait until the mark is reached; the caller
 *      does not block. Event and queue may be of different devices of one backend.
 *  E3  The host's wait returns OXY_OK when the mark is reached, and OXY_NOT_READY when the time is over before that
 *      (at once for 0). Destroying an event never disturbs waits already asked for.
 *
 * ERRORS
 *  F1  Every status but OXY_OK and OXY_NOT_READY leaves a sentence in `last_error` of the calling thread: what failed,
 *      the value seen. It stays until that thread's next failing call. Without a failure it is "".
 *  F2  A bad device index, a NULL handle where one is needed, a NULL output: OXY_INVALID_ARGUMENT.
 *  F3  Work that fails after its call returned fails its queue: `synchronize`, further work on the queue, the host's
 *      wait for events recorded behind it and `queue_destroy` give that status until the queue is gone. It is never
 *      swallowed. A queue that waits for such an event fails too.
 *  F4  A lost device gives OXY_DEVICE_LOST from everything but `score`, `last_error`, `free` and the destroy calls.
 *
 * THREADS
 *  T1  Every slot may be called from any thread at any time, also on the same queue; one call is atomic.
 *  T2  Nothing but alloc, free, a call with queue NULL, the host's waits, `synchronize` and `queue_destroy` may block.
 */
#ifndef OXYTORCH_BACKEND_H_
#define OXYTORCH_BACKEND_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define OXY_BACKEND_API_VERSION 1u

/* What a call returns. Fixed width, so that the enum's size is no part of the ABI. */
typedef int32_t oxy_status;
enum {
  OXY_OK = 0,
  OXY_NOT_READY = 1,        /* not an error: the event lies ahead */
  OXY_INVALID_ARGUMENT = 2, /* the caller's mistake */
  OXY_OUT_OF_MEMORY = 3,
  OXY_NOT_SUPPORTED = 4, /* a valid request that this device cannot serve */
  OXY_INVALID_STATE = 5, /* called at the wrong moment, for example after fork */
  OXY_DEVICE_ERROR = 6,  /* the device or its driver failed */
  OXY_DEVICE_LOST = 7,   /* the device is gone for the rest of the process */
  OXY_INTERNAL = 8       /* a bug in the backend */
};

/* Where memory lies. */
typedef int32_t oxy_memory;
enum {
  OXY_MEMORY_DEVICE = 0,
  OXY_MEMORY_HOST = 1 /* host memory that the device copies from and to at full speed; (optional):
                         OXY_NOT_SUPPORTED. Not counted in memory_info. */
};

/* Which side each pointer of a copy is on. Pinned and other host memory are both "host". */
typedef int32_t oxy_copy;
enum {
  OXY_COPY_HOST_TO_DEVICE = 0,
  OXY_COPY_DEVICE_TO_HOST = 1,
  OXY_COPY_DEVICE_TO_DEVICE = 2 /* both on one device; across devices where OXY_DEVICE_PEER_COPY is set */
};

/* Bits of oxy_device_properties.flags. */
enum {
  OXY_DEVICE_HOST_VISIBLE = 1,    /* the host may read and write device memory by its pointer */
  OXY_DEVICE_CHECKS_POINTERS = 2, /* see M5 */
  OXY_DEVICE_PEER_COPY = 4,       /* device to device copies between devices of this backend */
  OXY_DEVICE_SIMULATED = 8        /* not hardware: never chosen for a user who did not name it */
};

/* An in-order stream of work on one device, and a mark in one; both opaque and owned by whoever made them. */
typedef struct oxy_queue_s* oxy_queue;
typedef struct oxy_event_s* oxy_event;

/* Facts of a device that do not change. */
typedef struct oxy_device_properties {
  uint32_t size; /* set by the caller: see C4 */
  uint32_t flags;
  const char* name;          /* as the vendor writes it, for example "NVIDIA H200" */
  const char* architecture;  /* for example "sm_90"; "" where there is none */
  const char* torch_device;  /* type of the torch device this is, for example "cuda"; NULL: torch does not know it */
  uint64_t memory_bytes;     /* device memory */
  uint64_t link_bytes_per_s; /* host to device, one way; 0: unknown */
  uint32_t compute_units;    /* cores, multiprocessors; 0: unknown */
  uint32_t alignment;        /* of every allocation, a power of two, at least 64 */
} oxy_device_properties;

typedef struct oxy_memory_info {
  uint32_t size; /* set by the caller: see C4 */
  uint32_t reserved;
  uint64_t total_bytes;     /* what the device has for everyone */
  uint64_t free_bytes;      /* what an allocation could get now, as far as the device tells */
  uint64_t allocated_bytes; /* see M4 */
} oxy_memory_info;

/* One named number. Monotone counts and present values alike, for example "copies", "power". */
typedef struct oxy_counter {
  const char* name; /* snake_case */
  const char* unit; /* "1" for counts, "B", "W", "degC", "ns", ... */
  double value;
} oxy_counter;

/* Bits of oxy_queue_options.flags. */
enum {
  OXY_QUEUE_WRAP_NATIVE = 1 /* enqueue on the stream `native_handle` (the vendor's default stream may be NULL); it is
                               not destroyed with the queue. OXY_NOT_SUPPORTED where there is no such thing. */
};

typedef struct oxy_queue_options {
  uint32_t size; /* sizeof(oxy_queue_options) of the caller: see C4 */
  uint32_t flags;
  int32_t priority; /* 0 is normal, smaller is more urgent; a hint */
  uint32_t reserved;
  void* native_handle; /* read with OXY_QUEUE_WRAP_NATIVE, for example torch's current stream */
} oxy_queue_options;

/* Native kernels: oxytorch/backend_kernels.h, which includes this header. */
typedef struct oxy_kernels oxy_kernels;

typedef struct oxy_backend {
  uint32_t size;        /* sizeof(oxy_backend) */
  uint32_t api_version; /* OXY_BACKEND_API_VERSION */
  const char* name;
  const char* description;    /* one sentence for people */
  const oxy_kernels* kernels; /* (optional) */

  /* How good this backend is on this machine: 0 unusable, 1 to 9 simulated, 10 to 49 host processors, 50 to 100
   * accelerators. `*reason` gets one sentence, `*devices` the number of devices (0 with a score of 0). */
  int32_t (*score)(const char** reason, int32_t* devices);
  oxy_status (*device_properties)(int32_t device, oxy_device_properties* properties);
  oxy_status (*memory_info)(int32_t device, oxy_memory_info* info);
  /* (optional) Writes the first `capacity` counters to `counters` and to `*count` how many there are. `counters` may be
   * NULL with capacity 0. Names keep their order and meaning; values may come from a sample up to a second old. */
  oxy_status (*counters)(int32_t device, oxy_counter* counters, uint32_t capacity, uint32_t* count);

  oxy_status (*alloc)(int32_t device, oxy_memory kind, uint64_t bytes, void** memory);
  /* The caller has seen all work on the memory done. */
  oxy_status (*free)(int32_t device, void* memory);

  /* `queue` belongs to `device`, or is NULL for a call that is done when it returns. */
  oxy_status (*copy_async)(int32_t device, oxy_queue queue, void* to, const void* from, uint64_t bytes, oxy_copy kind);
  /* Every byte of [to, to + bytes) in device memory becomes `value`. */
  oxy_status (*fill_async)(int32_t device, oxy_queue queue, void* to, uint8_t value, uint64_t bytes);

  /* The queue group, all (optional) together. `options` may be NULL. */
  oxy_status (*queue_create)(int32_t device, const oxy_queue_options* options, oxy_queue* queue); /* (optional) */
  oxy_status (*queue_destroy)(oxy_queue queue);                                                   /* (optional) */
  /* `*event` NULL: makes an event, owned by the caller. Otherwise records that one again. */
  oxy_status (*event_record)(oxy_queue queue, oxy_event* event); /* (optional) */
  /* `queue` not NULL: the queue waits, the call returns at once, and the rest is ignored. `queue` NULL: the host waits
   * up to `timeout_ns` nanoseconds (0 asks, UINT64_MAX waits for ever); `*time_ns`, if not NULL, then gets the device's
   * clock at the mark, or 0 where it has none. */
  oxy_status (*event_wait)(oxy_queue queue, oxy_event event, uint64_t timeout_ns, uint64_t* time_ns); /* (optional) */
  oxy_status (*event_destroy)(oxy_event event);                                                       /* (optional) */
  /* `queue` NULL: all queues of the device. */
  oxy_status (*synchronize)(int32_t device, oxy_queue queue); /* (optional) */

  const char* (*last_error)(void);
} oxy_backend;

/* Bytes of oxy_backend in the first release of version 1: the least that a host accepts. */
#define OXY_BACKEND_SIZE_V1 (offsetof(oxy_backend, last_error) + sizeof(const char* (*)(void)))

/* Exported by a loadable backend. `host_api_version` is the host's OXY_BACKEND_API_VERSION. The table lives as long as
 * the process. NULL: this backend cannot serve that host. */
typedef const oxy_backend* (*oxy_backend_entry_fn)(uint32_t host_api_version);
#define OXY_BACKEND_ENTRY "oxy_backend_entry"

/* (optional) export of a backend that takes settings as text, in its own grammar. A backend that understands
 * "fault=copy:N" (the Nth copy from now fails after its call has returned), "fault=alloc:N" and "fault=lost:N" (the
 * device is gone from the Nth work item on), and "" (as if freshly started) has its handling of faults checked too. */
typedef oxy_status (*oxy_backend_configure_fn)(const char* settings);
#define OXY_BACKEND_CONFIGURE "oxy_backend_configure"

/* Put before the definitions of the two functions above. */
#ifdef __cplusplus
#define OXY_BACKEND_EXPORT extern "C" __attribute__((visibility("default")))
#else
#define OXY_BACKEND_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
}
#endif

#endif /* OXYTORCH_BACKEND_H_ */
