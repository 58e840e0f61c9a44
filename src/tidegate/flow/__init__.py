"""Flow: the verbs. The rooms read like the pipeline; stages hand over by rows in Postgres, never by calls.

    accept ──▶ decide ──▶ run          an event is stored, decided, and its runs are executed
                 │  ▲
                 ▼  │
                 hold                  what cannot launch now waits with a reason and a time, and is decided again
    keep · look · predict · control    beside the pipeline: background work, what operators read and do

Imports go one way: control, look and predict → keep → hold → run → call → code → decide and accept. `run` lies below
`hold` because the end of a run frees a slot, and the delivery that takes it is decided in the same transaction: `hold`
passes that in.
`shared_read` (one read of the database for many callers) is used by accept and look; `presence` (which processes are
alive, and whether the schema still fits them) by every process.
`trigger_backlog` (a trigger's policy for what waits: keep a newcomer out, or let others leave for it) by decide and
hold.

accept: who may publish, what is valid, what is stored. 202 only after the commit.
    access              check the token, its scope and rate before every route
    token_use           rate limits of tokens; the log of refused tokens
    lookups             bounded, cached reads on behalf of unauthenticated clients
    refusals            keep refused publish requests for a while, for `explain`
    approvals           make and check the links that decide approvals
    backlog             caps on what waits of a source: refuse, drop the oldest, dead-letter
    ingest              store events and their inbox rows; concurrent requests share commits
    start_targets       the trigger that a start of a workflow is for
    starts              start a workflow by name
    webhooks            look up a source's webhook; store the event of a signed request

decide: what happens to each event, one transaction per batch. Everything here runs under the same locks and commits at
once, so an event is never half decided.
    dispatch            claim new events from the inbox and decide them: fast path or general path
    gate                per source: admit, or hold until a slot (limit, pause, breaker)
    match               per event: which triggers fire
    deliver             per event and trigger: launch, hold, skip or fail; pure
    whole_batch         do all limits have room for a whole batch? then it is launched in one go; pure
    budgets             do the budgets of a trigger have room for a launch, and which of them holds it; pure
    delivery_state      load what `deliver` depends on under the triggers' locks, and save what it changed
    batch               match, deliver and create runs, for new and retried events alike
    inbox               which undecided events a batch takes: sources have shares
    one_by_one          when a batch fails: process its items separately, dead-letter the one at fault
    waits               events meet the runs that wait for them: results, wake-ups, cancellations
    approvals           a person's decision: its event and the result of the step that waits for it
    source_failures     failed runs that count for their source's breaker
    reporting           counts, metrics, log lines and decision rows, the same for every stage
    spans               the traces of what was decided
    time_slice          CPU-bound work yields to the event loop

hold: waiting events and deliveries. A row decides whether and when; the queue only wakes workers early.
    event_retry         held events whose slot has come pass the gate again
    arrivals            events for a later time meet the gate at that time, like new ones
    delivery_retry      due deliveries are decided again
    stale               deliveries that have waited for longer than `max_wait` leave
    closing             the time of a window has come: which of its events stand, which one gives the arguments
    budget_lines        who of those that wait for a budget may be decided now
    step_lines          the turns of steps that wait in the lines of budgets
    delivery_check      does a due delivery still stand, by event and trigger as they are now; pure
    replan              give waiting rows new times when a plan changes: the loop
    event_plan          the plan of a source: slots for its events
    delivery_plan       the plan of a trigger: times for its deliveries

run: the runs of one worker: claim what is due, have it called, write the outcome. A worker that lost its claim writes
nothing.
    runner              claim runs for one worker, have them executed, write what came of them
    claiming            claim due runs, some in advance; each claim is taken up once
    fair_claims         which due runs are claimed: workflows and their keys take turns
    worker_slots        the runs that one worker executes, in its slots, until their end is written
    outcomes            write outcomes of steps, suspensions and ends, many runs in one transaction
    children            the end of a child: its parent's step, the next child, the wake-up
    published           the events that runs publish, stored with their steps
    look_back           has the event that a run begins to wait for come already; did it time out
    budget_slots        what runs and steps hold of budgets, and their end gives back
    slot_line           slots that are held while a run executes: given back, taken again, or waited for
    step_budgets        answer steps that ask for budgets before they are called
    step_needs          do the budgets of a step have room for a call, and where does it wait; pure
    finish              the end of a run frees its slot, moves breakers, wakes the next delivery
    leases              renew leases from a thread of their own
    quarantine          execute runs whose workers died repeatedly, each alone

call: one attempt at one run: call the user's function, from the start or after its stored steps, until it ends or must
wait.
    execution           one attempt at one claimed run: call, stop, end
    states              the states of an execution
    steps               the steps of an execution: a call, a timer
    spending            a step asks for its budgets before it is called, and waits for its turn
    step_parts          what every kind of step is made of: begin, wait, write
    waits               steps that wait for events
    approvals           steps that wait for a person's decision
    children            steps that start other workflows and wait for their ends
    publishing          steps that publish events
    transaction         steps that write to this database: what they write and their result are one commit
    fit                 whether the code fits the steps that were recorded on another version of it
    marks               what a function says of its run: patches, tags
    journal             what one execution writes of its steps
    endings             how one attempt ends: finished, or suspended until a time; pure
    stopping            stop a call of a user's function, and wait for those that have not stopped yet
    spans               the traces of runs and steps

code: the functions that users write, what they are given, and how they are called.
    workflow            a workflow in Python: the function, its triggers, its version, how to call it
    context             what an `async def` function is given: `ctx`
    sync_context        the same for a synchronous function
    wait_call           calls of `ctx.wait_for` and its kind, and their results
    child_calls         calls of `ctx.run`, `ctx.start` and `ctx.map`, and the types of their results
    approval_call       calls of `ctx.approval`, and what they return
    calls               calls of `ctx` that were not awaited
    user_calls          calls of users' functions: what counts as a failure, which results can be stored
    http                workflows of kind `http`: signed, bounded requests

keep: background work that keeps the system moving and bounded.
    reconcile           release expired claims; send lost wake-ups again
    budgets             forget keys of budgets of which nothing is left
    children            cancel children with their parents; find those that were never launched
    schedule            publish the events of due ticks
    replay              process dead letters again
    event_replay        decide events again
    days                add the partitions of the next days of history
    prune               drop old days of history; delete old rows that have no day
    prune_preview       what would be old enough
    secrets             encrypt stored secrets with the first key

look: what operators read. Nothing here decides or writes.
    explain             why an event, a delivery or a run is where it is: find it, read the facts, compose the answer
    story               what was decided, as lines in order; pure
    why                 what an event or delivery waits for, and until when; pure
    why_run             the same for a run; pure
    waiting_steps       the same for a waiting step, one rule for each kind of step; pure
    near/               what almost took an event: triggers and waits of runs, looked up and compared
    ends                wait for the ends of runs
    lineage             what an event came of, and what a run has published
    health              the snapshot of the cluster, and the shared gauges
    verdict             the causes of a status other than ok; pure
    history             how long history is kept, and whether what is too old goes; pure
    budgets             where a delivery stands in the line of a budget, and who holds its slots
    backlog             queue depths and waiting rows; pure
    doctor              check what the guarantees depend on
    ready               can this process do its work
    notices             warnings about the configuration

predict: what would happen, or would have happened to the events of the past. Nothing here writes.
    turn                one prediction at a time in a process
    evaluation          what a trigger would do with an event
    trigger_edit        what a trigger, edited or as it is, would have done
    source_limit        what another limit of a source would have held
    budget_edit         what an edited budget cannot evaluate of those that wait
    replay              what a replay of events would launch

control: what operators do, shared by API and CLI. Each verb is one transaction with its audit row.
    sources             limits, breakers, pause, resume
    triggers            create, update, delete, pause, resume
    budgets             set, delete, pause, resume; those declared in code
    workflows           create, update, delete, rotate the secret (kind `http`)
    schedules           pause, resume, run now, backfill
    webhooks            set, rotate, retire, delete
    tokens              create, revoke
    runs                cancel, retry, rerun
    run_bulk            … many runs
    events              replay one, many at a rate, stop
    dead_letters        replay one, many at a rate, stop
    retries             cancel and force waiting rows, one or many: the table of kinds
    event_retries       … for events
    delivery_retries    … for deliveries
    step_retries        … for steps
    retry_verbs         what a kind provides for cancel and force
"""
