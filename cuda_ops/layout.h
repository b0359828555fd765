/* layout.h: every byte that two processes share. Plain C, fixed widths, explicit padding.
 *
 * Core segment (created by the coordinator; roles and the client map it):
 *
 *   0            +--------------------+
 *                | tp_header          |  written by the coordinator; `version` is stored last
 *   roles        +--------------------+
 *                | tp_role x (2 + N)  |  coordinator, reader, decoder 0..N-1: heartbeat, bell
 *   ring         +--------------------+
 *                | tp_ring            |  the reader's cursor
 *                | tp_consumer x N    |  what decoder k has released
 *   decoders     +--------------------+
 *                | tp_decoder x N     |  turn word and the two commit records
 *   client       +--------------------+
 *                | tp_client          |  the handle that reads the output rings
 *   rows         +--------------------+
 *                | admitted, freed, marks, tp_admission, ids, eos ids     (coordinator writes)
 *                | tp_progress x 2    |                                   (decoders write)
 *   blocks       +--------------------+
 *                | tp_block           |  who owns each KV block
 *   commands     +--------------------+
 *                | tp_command         |  client -> coordinator, reply in the same slot
 *   slots        +--------------------+
 *                | tp_step + columns  |  ring slots; behind the columns a received message, raw
 *   frames       +--------------------+
 *                | tp_frame + columns |  output ring of each decoder
 *                +--------------------+
 *
 * Source segment (created by the coordinator; the engine's writer maps this one only):
 *
 *   0            +--------------------+
 *                | tp_source          |  sizes, cursors, bells of writer and reader; the queue
 *   control      +--------------------+
 *                | uint64 x rows      |  what the scheduler must act on
 *   exported     +--------------------+
 *                | tp_export, handles |  the engine's ring in a GPU's memory, of such a source
 *   slots        +--------------------+
 *                | tp_step + columns  |
 *                +--------------------+
 *
 * Orders are named at the code that uses them (atomics.hpp); here stands who owns a field.
 */
#ifndef TP_LAYOUT_H
#define TP_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define TP_ASSERT_SIZE(type, bytes)                                                                \
  static_assert(sizeof(type) == (bytes), #type " has another size")
#else
#define TP_ASSERT_SIZE(type, bytes)                                                                \
  _Static_assert(sizeof(type) == (bytes), #type " has another size")
#endif

enum {
  TP_LAYOUT_VERSION = 11,   /* raised by hand with any change below */
  TP_LINE_BYTES = 128,      /* two cache lines: the prefetcher pairs them */
  TP_PAGE_BYTES = 4096,     /* slots and frames begin on a page */
  TP_COLUMN_ALIGN = 16,     /* every column of a step or frame begins so aligned */
  TP_MAX_DRAFT_TOKENS = 16, /* tokens a row may emit in a step; statistics have room for so many */
  TP_MAX_DECODERS = 16,     /* released cursors of the client have room for so many */
  TP_CONFIG_BYTES = 3072,   /* the configuration as JSON text, in the header */
  TP_IPC_HANDLE_BYTES = 64, /* of CUDA's handles for other processes */
  TP_REASON_BYTES = 256,    /* why the state is what it is, in words */
};

#define TP_CORE_MAGIC UINT64_C(0x65726f632e707474)   /* "ttp.core" */
#define TP_SOURCE_MAGIC UINT64_C(0x6372732e70746b74) /* "tktp.src" */

/* Bytes of a segment file that a party locks while it lives (open file description locks). */
enum {
  TP_LOCK_COORDINATOR = 0,
  TP_LOCK_READER = 1,
  TP_LOCK_CLIENT = 2,
  TP_LOCK_WRITER = 3,
  TP_LOCK_DECODER = 16, /* + k */
};

enum { TP_ROLE_COORDINATOR = 0, TP_ROLE_READER = 1, TP_ROLE_DECODER = 2 /* + k */ };

/* What a sleeper waits for; stands in tp_bell.waiting while it sleeps. */
enum {
  TP_WAIT_NOTHING = 0,
  TP_WAIT_INPUT = 1, /* the next step, slot, frame or command */
  TP_WAIT_SPACE = 2, /* room in the ring that it writes */
};

enum {
  TP_STATE_STARTING = 0,
  TP_STATE_IDLE = 1,
  TP_STATE_RUNNING = 2,
  TP_STATE_DEGRADED = 3,
  TP_STATE_DRAINING = 4,
  TP_STATE_STALLED = 5,
  TP_STATE_FAILED = 6,
  TP_STATE_STOPPED = 7,
};

/* Row states in a step (column `states`). */
enum { TP_ROW_TOKEN = 0, TP_ROW_NONE = 1, TP_ROW_RECOVERY = 2, TP_ROW_ACKNOWLEDGED = 3 };

/* Terminal states of a row; finish_reason of a frame's row. 0: not finished. */
enum {
  TP_FINISH_NONE = 0,
  TP_FINISH_STOP = 1,
  TP_FINISH_LENGTH = 2,
  TP_FINISH_ABORT = 3,
  TP_FINISH_RECOVERY = 4,
  TP_FINISH_ERROR = 5,
  TP_FINISH_SHUTDOWN = 6,
};

/* No ends, beside them in a frame's finish_reason: the engine has let go of the row; or (zmq only)
 * a message names the row without a token. Such a row has no tokens; only with
 * tp_options.report_acknowledgements. */
enum { TP_OUTPUT_ACKNOWLEDGED = 32, TP_OUTPUT_SILENT = 33 };

/* A mark that ends nothing: a decode instance's row is shielded, its tokens are not delivered. */
enum { TP_MARK_SHIELD = 16 };

/* Bits of a control word: (generation << 32) | (preemptions << 8) | bits. */
enum { TP_CONTROL_ABORT = 1, TP_CONTROL_PREEMPT = 2, TP_CONTROL_FINISHED = 4 };

/* Why the reader refused a step (tp_step.bad). 0: good. */
enum {
  TP_BAD_NONE = 0,
  TP_BAD_ROWS = 1,     /* more rows than max_num_seqs */
  TP_BAD_WIDTH = 2,    /* more logprob columns than top_logprobs + 1 */
  TP_BAD_TOKENS = 3,   /* token count does not follow from the rows */
  TP_BAD_BYTES = 4,    /* the body does not fit, or is not what the counts say */
  TP_BAD_FLAGS = 5,    /* unknown mode or flag */
  TP_BAD_SEQUENCE = 6, /* its number is not the one that is due: the cursor has passed old bytes */
  TP_BAD_MESSAGE = 7,  /* not a message of this source, or one that contradicts itself */
  TP_BAD_LOST = 8,     /* its body lay on a GPU, and went with the engine */
  TP_BAD_REASONS = 9,  /* how many reasons there are */
};

/* Where the engine's steps come from: tp_options.source and tp_source.kind. */
enum {
  TP_SOURCE_SHM = 0,      /* the engine's writer fills steps of the source segment */
  TP_SOURCE_SYSV = 1,     /* a System V queue that FastDeploy's ops write */
  TP_SOURCE_ZMQ = 2,      /* a socket that FastDeploy's worker sends to */
  TP_SOURCE_CUDA_IPC = 3, /* as shm, but bodies may lie in a ring on the engine's GPU */
};

/* tp_options.role */
enum { TP_ENGINE_MIXED = 0, TP_ENGINE_PREFILL = 1, TP_ENGINE_DECODE = 2 };

/* tp_admission.flags */
enum {
  TP_ADMISSION_DISAGGREGATED = 1, /* prefill and decode run on two instances */
  TP_ADMISSION_WARM_UP = 2,       /* its tokens are counted, not delivered */
};

/* tp_admission.phase */
enum {
  TP_PHASE_RUNNING = 0,
  TP_PHASE_PREEMPTING = 1, /* the engine is told, and has not acknowledged */
  TP_PHASE_PREEMPTED = 2,  /* it has: resume() may come */
};

/* message_flag of a step */
enum { TP_MESSAGE_TARGET = 3, TP_MESSAGE_DRAFT = 4 };

enum {
  TP_STEP_ACCEPT = 1,        /* column accept_num is there: several tokens a row */
  TP_STEP_POSITIONS = 2,     /* column positions is there */
  TP_STEP_NOT_NEED_STOP = 4, /* the engine has more work (echoed) */
  TP_STEP_POOLING = 8,       /* one vector of `width` floats a row instead of tokens */
  TP_STEP_PROMPT = 16,       /* logprobs of prompt tokens; positions tell where in the prompt */
  TP_STEP_UNSTAMPED = 32,    /* the wire has no generations: a row is whoever is admitted there */
  TP_STEP_GAP = 64,          /* steps before this one may be lost: every running request ends */
  TP_STEP_MESSAGE_END = 128, /* sysv, zmq: with it all rows of a message are told */
};

enum { TP_COMMAND_FREE = 0, TP_COMMAND_POSTED = 1, TP_COMMAND_DONE = 2 };

/* Configured sizes; identical in both segments. */
typedef struct {
  uint32_t max_num_seqs;
  uint32_t top_logprobs;
  uint32_t max_draft_tokens;
  uint32_t num_decoders;
  uint32_t ring_slots;
  uint32_t output_slots;
  uint32_t source_slots;
  uint32_t command_slots;
  uint32_t num_blocks;
  uint32_t block_size;
  uint32_t max_eos_ids;
  uint32_t max_request_id_bytes;
  uint32_t max_pooling_floats;
  uint32_t raw_bytes; /* of the message as received, behind a ring slot's columns; 0: none */
} tp_sizes;
TP_ASSERT_SIZE(tp_sizes, 56);

/* What a decoder must know of the configuration beside the sizes. */
typedef struct {
  uint32_t role;                    /* TP_ENGINE_* */
  uint32_t internal_adapter;        /* end tokens are not delivered */
  uint32_t enable_draft_logprob;    /* steps of drafts are delivered, else dropped */
  uint32_t num_speculative_tokens;  /* drafts per row and step, for the statistics */
  uint32_t source;                  /* TP_SOURCE_* */
  uint32_t report_acknowledgements; /* the client hears when the engine lets go of a row */
} tp_options;
TP_ASSERT_SIZE(tp_options, 24);

typedef struct {
  uint64_t magic;
  uint64_t version; /* coordinator, stored last: the segment is ready */
  uint64_t total_bytes;
  tp_sizes sizes;
  tp_options options;
  uint64_t slot_bytes;
  uint64_t frame_bytes;
  uint64_t wall_offset_ns; /* wall clock minus CLOCK_MONOTONIC at start */
  uint64_t owner_start;    /* coordinator's start time, clock ticks since boot */
  uint32_t owner_pid;
  uint32_t owner_namespace; /* inode of its pid namespace: pids of others mean nothing here */
  char boot_id[40];
  /* From here on the coordinator writes while others read. */
  uint32_t state;      /* TP_STATE_* */
  uint32_t state_role; /* index of the role at fault, or UINT32_MAX */
  uint64_t state_since_ns;
  uint32_t health_port;
  uint32_t accepting; /* 0: draining or stopped, submit is refused */
  uint32_t live_rows;
  uint32_t free_blocks;
  uint32_t waiting_submits;
  uint32_t rows_high_water;
  uint32_t running_rows; /* live rows that the engine runs: not ended, not preempted */
  uint32_t pad0_;
  uint64_t ticks;
  uint64_t running_since_ns; /* since when the engine has had something to run; 0: it has not */
  uint64_t swept[TP_MAX_DECODERS]; /* turn word of decoder k that is swept and applied */
  char reason[TP_REASON_BYTES];
  char config[TP_CONFIG_BYTES];
  uint8_t pad_[TP_PAGE_BYTES - 376 - TP_REASON_BYTES - TP_CONFIG_BYTES];
} tp_header;
TP_ASSERT_SIZE(tp_header, TP_PAGE_BYTES);

/* Where one role sleeps. Whoever changes what it waits for rings. */
typedef struct {
  uint32_t bell;     /* futex word: any ringer adds one */
  uint32_t waiting;  /* sleeper: TP_WAIT_*, 0 when awake */
  uint64_t wake_at;  /* sleeper: do not ring before this sequence is released */
  uint64_t since_ns; /* sleeper: when the wait began */
  uint8_t pad_[TP_LINE_BYTES - 24];
} tp_bell;
TP_ASSERT_SIZE(tp_bell, TP_LINE_BYTES);

typedef struct {
  uint64_t heartbeat_ns;  /* owner, each turn of its own loop */
  uint64_t progress_ns;   /* owner, when it last moved something on */
  uint64_t turns;         /* owner */
  uint64_t blocked_ns;    /* owner: total time waited for space */
  uint64_t blocked_times; /* owner */
  uint64_t start_time;    /* owner: its start, clock ticks since boot */
  uint32_t pid;           /* owner, before its first heartbeat */
  uint32_t epoch;         /* coordinator: how many lives this role has had */
  uint8_t pad_[TP_LINE_BYTES - 56];
  tp_bell bell;
} tp_role;
TP_ASSERT_SIZE(tp_role, 2 * TP_LINE_BYTES);

typedef struct {
  uint64_t cursor; /* reader: slots below it are published */
  uint8_t pad_[TP_LINE_BYTES - 8];
} tp_ring;
TP_ASSERT_SIZE(tp_ring, TP_LINE_BYTES);

typedef struct {
  uint64_t released;   /* decoder k: slots below it may be written again */
  uint64_t high_water; /* decoder k: most slots that it ever found published */
  uint8_t pad_[TP_LINE_BYTES - 16];
} tp_consumer;
TP_ASSERT_SIZE(tp_consumer, TP_LINE_BYTES);

/* Counters of one decoder; exact, since a turn commits them with its progress.
 * tokens_seen == tokens_delivered + every dropped_*. */
typedef struct {
  uint64_t steps;
  uint64_t rows_seen;
  uint64_t tokens_seen;
  uint64_t tokens_delivered;
  uint64_t dropped_padded;     /* generation 0: a padded row */
  uint64_t dropped_unadmitted; /* no admission holds this row, or its generation is not out yet */
  uint64_t dropped_stale;      /* of an older generation */
  uint64_t dropped_early;      /* saved before the admission's from_sequence */
  uint64_t dropped_finished;   /* after the row's end, or after its mark */
  uint64_t dropped_repeated;   /* a position that was delivered before, or a row twice in a step */
  uint64_t dropped_bad_row;    /* row index out of range, or a bad count or state */
  uint64_t dropped_chunk;      /* of a prefill chunk that is not the last */
  uint64_t dropped_adapter;    /* end tokens that the internal adapter does not want */
  uint64_t dropped_prefill;    /* drafts behind a prefill instance's first token */
  uint64_t dropped_shielded;   /* of a decode instance's row that is being preempted */
  uint64_t dropped_warm_up;    /* of warm-up requests */
  uint64_t finals_stop;
  uint64_t finals_length;
  uint64_t finals_abort;
  uint64_t finals_recovery;
  uint64_t finals_error;
  uint64_t finals_shutdown;
  uint64_t acknowledgements;
  uint64_t bad_rows; /* counted by decoder 0 only, as all bad_* */
  uint64_t bad_width;
  uint64_t bad_tokens;
  uint64_t bad_bytes;
  uint64_t bad_flags;
  uint64_t bad_sequence;
  uint64_t bad_message;
  uint64_t bad_lost;
  uint64_t completions;     /* requests that ended with a result; not those of a prefill instance */
  uint64_t draft_rows_seen; /* rows of draft steps: what they hold are not tokens */
  uint64_t draft_rows_delivered;
  uint64_t prompt_rows;
  uint64_t poison_slots; /* skipped: they killed this decoder twice */
  uint64_t spec_rows;    /* rows of speculative steps that emitted */
  uint64_t
      spec_heads[TP_MAX_DRAFT_TOKENS]; /* tokens emitted per head; head 0 is the target's own */
  uint64_t pad_[2];
} tp_counters;
TP_ASSERT_SIZE(tp_counters, 55 * 8);

typedef struct {
  uint64_t slots_done;           /* next ring sequence to decode */
  uint64_t frames;               /* frames written so far */
  uint64_t next_source_sequence; /* source sequences below it are decoded */
  uint64_t pad_[6];
  tp_counters counters;
} tp_commit;
TP_ASSERT_SIZE(tp_commit, 4 * TP_LINE_BYTES);

/* Histograms: one copy, so the turn in hand may be lost at a kill. The bounds of each are in
 * histograms.hpp. Sums are kept in the unit that is observed (ns, tokens, or tokens per 1000 s). */
enum { TP_MAX_BUCKETS = 30 };
typedef struct {
  uint64_t count[TP_MAX_BUCKETS];
  uint64_t sum;
  uint64_t pad_;
} tp_histogram;
TP_ASSERT_SIZE(tp_histogram, 2 * TP_LINE_BYTES);

typedef struct {
  uint64_t turn;    /* decoder k: low bit names the valid copy of all that a turn commits */
  uint64_t attempt; /* decoder k: sequence + 1 of the slot that it is decoding, 0 between turns */
  uint64_t attempt_deaths; /* decoder k: how often that slot has killed it */
  uint8_t pad_[TP_LINE_BYTES - 24];
  tp_commit commit[2];
  tp_histogram saved_to_published; /* engine's save -> ring */
  tp_histogram saved_to_committed; /* engine's save -> frame readable */
  tp_histogram time_to_first_token;
  tp_histogram time_per_output_token;
  tp_histogram request_queue_time;
  tp_histogram request_prefill_time;
  tp_histogram request_decode_time;
  tp_histogram request_inference_time;
  tp_histogram request_generation_tokens;
  tp_histogram request_token_ratio;
} tp_decoder;
TP_ASSERT_SIZE(tp_decoder, 29 * TP_LINE_BYTES);

typedef struct {
  uint64_t released; /* client: frames of decoder k below it are done with */
  uint8_t pad_[TP_LINE_BYTES - 8];
} tp_output;
TP_ASSERT_SIZE(tp_output, TP_LINE_BYTES);

typedef struct {
  uint32_t pid;   /* client, after it has the lock */
  uint32_t epoch; /* clients so far */
  uint64_t start_time;
  uint64_t next_number;      /* client: number of the next command */
  uint64_t progress_ns;      /* client: when it last released a frame */
  uint64_t unmatched_drafts; /* clients so far: rows of drafts whose target was not there */
  uint8_t pad_[TP_LINE_BYTES - 40];
  tp_bell bell;
  tp_output output[TP_MAX_DECODERS];
} tp_client;
TP_ASSERT_SIZE(tp_client, (2 + TP_MAX_DECODERS) * TP_LINE_BYTES);

typedef struct {
  uint64_t from_sequence; /* coordinator: applies to source sequences from here on */
  uint64_t word;          /* coordinator, after it: (generation << 8) | TP_FINISH_* or TP_MARK_* */
} tp_mark;
TP_ASSERT_SIZE(tp_mark, 16);

/* What a decoder must know of a row's request. Coordinator writes it before the generation. */
typedef struct {
  uint64_t command_number; /* of the submit; with the generation it tells "applied" */
  uint64_t from_sequence;
  uint64_t arrival_ns;
  uint64_t preprocess_end_ns; /* 0: unknown, as the next */
  uint64_t inference_start_ns;
  uint32_t max_tokens;  /* 0: no limit */
  uint32_t num_emitted; /* tokens delivered elsewhere before (positions start there) */
  uint32_t prompt_tokens;
  uint32_t num_eos;
  uint32_t id_bytes;
  uint32_t first_block; /* UINT32_MAX: none */
  uint32_t num_blocks;
  uint32_t num_chunks;          /* tokens of all prefill chunks but the last are not delivered */
  uint32_t flags;               /* TP_ADMISSION_* */
  uint32_t phase;               /* TP_PHASE_*; the coordinator's own, for its successor */
  uint64_t acknowledged_before; /* acknowledgements that were there when the engine was told */
  uint64_t acknowledge_from;    /* the engine was told at this source sequence; UINT64_MAX: never */
  uint32_t handed_over;         /* 1: prefill_done() was called */
  uint32_t pad0_;
  uint64_t from_barrier; /* of a queue: steps received before this barrier are a former life's */
  uint32_t pad_[4];
} tp_admission;
TP_ASSERT_SIZE(tp_admission, TP_LINE_BYTES);

/* Two copies, chosen by the owning decoder's turn word. */
typedef struct {
  uint32_t generation;
  uint32_t terminal;     /* TP_FINISH_*, at most once per generation */
  uint32_t emitted;      /* tokens delivered, num_emitted included */
  uint32_t acknowledged; /* generation that the engine acknowledged (state 3) */
  uint64_t first_token_ns;
  uint64_t last_token_ns;
  uint64_t num_acknowledged; /* acknowledgements of this generation */
  uint32_t chunks;           /* prefill chunks seen */
  uint32_t last_send_idx;    /* where the last output began: drafts belong to it */
  uint32_t spec_steps;       /* speculative steps that emitted */
  uint32_t pad_;
  uint64_t idle_at; /* source sequence + 1 of the last step that showed the ended row empty */
  uint32_t heads[TP_MAX_DRAFT_TOKENS]; /* tokens emitted per head */
} tp_progress;
TP_ASSERT_SIZE(tp_progress, TP_LINE_BYTES);

typedef struct {
  uint64_t owner; /* coordinator: (row << 32) | generation; generation 0: free */
  uint32_t next;  /* next block of the same admission, UINT32_MAX: last */
  uint32_t pad_;
} tp_block;
TP_ASSERT_SIZE(tp_block, 16);

/* One command of the client; the reply comes back in the same slot. `id` and `eos` follow. */
typedef struct {
  uint32_t state;       /* futex word, TP_COMMAND_*: client posts and frees, coordinator answers */
  uint32_t kind;        /* client: tokenpipe.commands.CommandKind */
  uint64_t number;      /* client: ever-growing */
  uint64_t choice;      /* coordinator, before the first effect: (row << 32) | generation */
  uint64_t deadline_ns; /* client: CLOCK_MONOTONIC; 0: answer at once */
  uint64_t arrival_ns;  /* client */
  uint64_t argument; /* client: by kind; of a submit the coordinator's, with the choice: barrier */
  uint32_t row;      /* client: wanted row, UINT32_MAX: any */
  uint32_t generation; /* client: which life of the row (abort by row) */
  uint32_t max_tokens;
  uint32_t num_emitted;
  uint32_t prompt_tokens;
  uint32_t num_blocks;
  uint32_t num_eos;
  uint32_t id_bytes;
  uint32_t status; /* coordinator: tokenpipe.commands.ReplyStatus */
  uint32_t reply_row;
  uint32_t reply_generation;
  uint32_t reply_first_block;
  uint64_t reply_value;
  uint64_t preprocess_end_ns;
  uint64_t inference_start_ns;
  uint32_t num_chunks;
  uint32_t flags; /* TP_ADMISSION_* */
} tp_command;
TP_ASSERT_SIZE(tp_command, TP_LINE_BYTES);

/* One step of the engine, in the source ring and in the ring. Columns follow, in this order, each
 * TP_COLUMN_ALIGN-aligned (n rows, m tokens, T = width):
 *   rows uint32[n], generations uint32[n], states uint8[n], positions int32[n] (flag),
 *   accept_num int32[n] (flag), tokens int32[m], topk_ids int32[m,T], logprobs float32[m,T],
 *   ranks int32[m] (T > 0).
 * Without TP_STEP_ACCEPT m == n. A pooling step has rows, generations, states and logprobs [n,T].
 */
typedef struct {
  uint64_t sequence;        /* ring: the reader's, set before it is published */
  uint64_t source_sequence; /* source: the writer's, likewise */
  uint64_t saved_ns;        /* writer: CLOCK_MONOTONIC at the save */
  uint64_t published_ns;    /* reader */
  uint64_t saved_tokens;    /* writer: tokens saved up to and with this step */
  uint32_t num_rows;
  uint32_t num_tokens;
  uint32_t width;
  uint32_t flags;        /* TP_STEP_* */
  uint32_t message_flag; /* 3 target, 4 draft */
  uint32_t body_bytes;
  uint32_t bad;          /* reader: TP_BAD_*; no row of the step has a token then */
  uint32_t device_epoch; /* writer: the body lies in the ring that this tp_export.epoch exports */
  uint64_t barrier;      /* reader of a queue: the last barrier that it met before this step */
  uint8_t pad_[TP_LINE_BYTES - 80];
} tp_step;
TP_ASSERT_SIZE(tp_step, TP_LINE_BYTES);

/* One output frame. Columns follow (n rows, m tokens, T = width, f finals):
 *   row uint32[n], generation uint32[n], send_idx uint32[n], token_offsets uint32[n+1],
 *   finish_reason uint8[n], token_ids int32[m], topk_ids int32[m,T], topk_logprobs float32[m,T],
 *   ranks int32[m] (T > 0), first_token_ns uint64[n], draft_offsets uint32[n+1] and draft_token_ids
 *   int32[d] (d > 0: drafts behind a prefill instance's first token), finals tp_final[f],
 *   ids uint8[f, max_request_id_bytes]. A pooling frame has topk_logprobs [n,T] and no tokens. */
typedef struct {
  uint64_t number;
  uint64_t sequence; /* ring sequence; of a turn without a slot: the next one */
  uint64_t source_sequence;
  uint64_t saved_ns;
  uint64_t published_ns;
  uint64_t committed_ns;
  uint32_t decoder;
  uint32_t num_rows;
  uint32_t num_tokens;
  uint32_t width;
  uint32_t num_finals;
  uint32_t message_flag;
  uint32_t has_slot; /* 0: finals of marks only, no step behind it */
  uint32_t flags;    /* TP_STEP_NOT_NEED_STOP, TP_STEP_POOLING, TP_STEP_PROMPT, TP_STEP_ACCEPT,
                        TP_STEP_GAP, TP_STEP_MESSAGE_END */
  uint32_t bytes;
  uint32_t num_drafts;
  uint32_t num_firsts; /* rows whose first output this is */
  uint32_t step_rows;  /* rows of the step behind it, whosever they are */
  uint8_t pad_[TP_LINE_BYTES - 96];
} tp_frame;
TP_ASSERT_SIZE(tp_frame, TP_LINE_BYTES);

/* What only the last output of a request carries; the id lets a later client name it. */
typedef struct {
  uint32_t index; /* of the row in this frame */
  uint32_t id_bytes;
  uint32_t num_tokens; /* delivered in all */
  uint32_t prompt_tokens;
  uint64_t arrival_ns;
  uint64_t first_token_ns;
  uint64_t last_token_ns;
  uint32_t spec_steps;
  uint32_t pad_[5];
  uint32_t heads[TP_MAX_DRAFT_TOKENS];
} tp_final;
TP_ASSERT_SIZE(tp_final, TP_LINE_BYTES);

/* The System V queue, of a source of that kind. */
typedef struct {
  uint64_t claim;          /* reader: sequence + 1 of the slot that msgrcv may fill, 0: none yet */
  uint64_t barrier_cursor; /* reader: its cursor when it met the last barrier */
  uint64_t barrier_seen;   /* reader, after it: that barrier's number */
  uint64_t barrier_sent;   /* coordinator, before it sends it */
  uint64_t saved_tokens;   /* reader: tokens received */
  uint64_t leftovers;      /* coordinator: messages of an earlier run that it threw away */
  int32_t key;             /* coordinator */
  int32_t id;              /* coordinator, and a reader that had to make it again */
  uint32_t is_created;     /* 1: this pipeline has made it, and removes it */
  uint32_t barrier_pid;    /* coordinator, before a barrier: who sends it */
  uint32_t former_pid;     /* coordinator: whoever sent barriers before it */
  uint32_t ipc_namespace;  /* coordinator: inode of the namespace that the queue is in */
  uint64_t gap_at; /* reader: sequence + 1 of the step that says that the queue was lost; 0: none */
  uint8_t pad_[TP_LINE_BYTES - 80];
} tp_queue;
TP_ASSERT_SIZE(tp_queue, TP_LINE_BYTES);

/* The writer's ring of slots in a GPU's memory, for a reader of cuda-ipc. The handles of the events
 * that say "packed" follow, TP_IPC_HANDLE_BYTES each, one a slot. */
typedef struct {
  uint64_t epoch;      /* writer, stored last: its tp_source.writer_epoch; 0: nothing is exported */
  uint64_t attached;   /* reader: epoch of the ring that it has open; 0: none */
  uint64_t ring_bytes; /* writer, as all below */
  uint64_t slot_bytes;
  uint32_t num_slots;
  uint32_t layout_version;
  uint8_t device_uuid[16];
  uint8_t memory[TP_IPC_HANDLE_BYTES];
  uint8_t pad_[8];
} tp_export;
TP_ASSERT_SIZE(tp_export, TP_LINE_BYTES);

typedef struct {
  uint64_t magic;
  uint64_t version; /* coordinator, stored last */
  uint64_t total_bytes;
  tp_sizes sizes;
  uint64_t slot_bytes;
  uint64_t owner_start;
  uint32_t owner_pid;
  uint32_t owner_namespace;
  char boot_id[40];
  uint32_t gone;  /* coordinator: 1 when the pipeline has ended for good */
  uint32_t kind;  /* TP_SOURCE_* */
  uint32_t owned; /* coordinator: 1 when the client owns it, and replaces it when it is killed */
  uint32_t pad_;
  uint64_t grace_ns; /* coordinator: somebody may bring a dead pipeline back for so long */
  uint8_t pad0_[TP_LINE_BYTES * 2 - 168];
  uint64_t published; /* writer: steps below it may be read; sysv: reader, messages received */
  uint8_t pad1_[TP_LINE_BYTES - 8];
  uint64_t released; /* reader: slots of steps below it may be written again */
  uint8_t pad2_[TP_LINE_BYTES - 8];
  tp_bell reader_bell;
  tp_bell writer_bell;
  uint32_t writer_pid;   /* writer, after it has the lock */
  uint32_t writer_epoch; /* writers so far */
  uint64_t writer_start;
  uint64_t beat_ns;    /* writer: engine.beat() or the last save */
  uint64_t busy;       /* writer: 1 while it said that it works without saving */
  uint64_t blocked_ns; /* writer: time that saves waited for space */
  uint8_t pad3_[TP_LINE_BYTES - 40];
  tp_queue queue;
} tp_source;
TP_ASSERT_SIZE(tp_source, 8 * TP_LINE_BYTES);

#endif
